/*
 * The C half of the engine: fio's callbacks, translated to the calls of engine.h.
 */
#include <errno.h>
#include <stddef.h>
#include <string.h>

#include "fio.h"
#include "optgroup.h"
#include "smalloc.h"
#include "zbd.h"

#include "engine.h"

/* Renamed in later versions of fio. */
#ifndef ZBD_MAX_OPEN_ZONES
#define ZBD_MAX_OPEN_ZONES ZBD_MAX_WRITE_ZONES
#endif

/* Exported by fio. */
extern const char fio_version_string[];

/* Called by get_ioengine() (lib.rs). */
struct ioengine_ops *freestone_engine(void);
static struct ioengine_ops engine;

/* ---- options ---- */

struct options {
	/* fio stores the job here while it parses options; no option may be at offset 0. */
	void *job;
	char *device;
};

static struct fio_option options[] = {
	{
		.name = "device",
		.lname = "Freestone device",
		.type = FIO_OPT_STR_STORE,
		.off1 = offsetof(struct options, device),
		.help = "NAME=KIND[,key=value]... as for `freestone serve`; several are separated by blanks, and the last one is used",
		.category = FIO_OPT_C_ENGINE,
		.group = FIO_OPT_G_INVALID,
	},
	{
		.name = NULL,
	},
};

static const char *device_spec(const struct thread_data *td)
{
	const struct options *options = td->eo;

	return options && options->device ? options->device : "";
}

/* ---- setup and cleanup ---- */

static void say(const char *sentence)
{
	log_err("freestone: %s\n", sentence);
}

/*
 * Detects a fio built from other sources, whose structures have another layout. Both `io_ops` and `thread_number` lie
 * far back in struct thread_data, so they match only if everything before them has the same size. The lookup of the
 * job by number matches only if the whole structure has.
 */
static bool is_compatible(const struct thread_data *td)
{
	if (strcmp(fio_version_string, FREESTONE_FIO_VERSION)) {
		log_err("freestone: the engine was built for %s, and this is %s; rebuild it: cargo xtask fio\n",
			FREESTONE_FIO_VERSION, fio_version_string);
		return false;
	}
	if (td->io_ops == &engine && td->thread_number - 1 < thread_number && tnumber_to_td(td->thread_number - 1) == td)
		return true;
	log_err("freestone: the engine was built for a %s configured differently; set FREESTONE_FIO_SOURCE to the source that "
		"this fio was built from, and run: cargo xtask fio\n", FREESTONE_FIO_VERSION);
	return false;
}

static unsigned int count_users(const struct thread_data *td)
{
	unsigned int i, count = 0;

	for (i = 0; i < thread_number; i++) {
		const struct thread_data *other = tnumber_to_td(i);

		if (other->io_ops == &engine && !strcmp(device_spec(other), device_spec(td)))
			count++;
	}
	return count;
}

/* Attaches the job to its device at the first call. */
static int attach(struct thread_data *td)
{
	struct freestone_job *job;
	int error;

	if (td->io_ops_data)
		return 0;
	if (!*device_spec(td)) {
		say("device is missing; for example device=ram0=ram,disksize=1G");
		return EINVAL;
	}
	error = freestone_attach(device_spec(td), count_users(td), &job, say);
	if (!error)
		td->io_ops_data = job;
	return error;
}

/* Checks if the device can run the job. */
static int check(const struct thread_data *td, const struct freestone_traits *traits)
{
	enum fio_ddir ddir;

	if (td->o.filename) {
		log_err("freestone: filename=%s is not supported; the device is set with device=\n",
			td->o.filename);
		return EINVAL;
	}
	if (td->o.nr_files > 1) {
		log_err("freestone: nrfiles=%u: a device is one file\n", td->o.nr_files);
		return EINVAL;
	}
	if (traits->read_only && (td_write(td) || td_trim(td))) {
		log_err("freestone: the device is read-only; only rw=read and rw=randread are possible\n");
		return EROFS;
	}
	for (ddir = DDIR_READ; ddir < DDIR_RWDIR_CNT; ddir++) {
		if (!(td->o.td_ddir & (1 << ddir)))
			continue;
		if (td->o.min_bs[ddir] % traits->logical_block) {
			log_err("freestone: bs=%llu: the device has blocks of %u bytes\n", td->o.min_bs[ddir],
				traits->logical_block);
			return EINVAL;
		}
	}
	return 0;
}

/* Makes the device the job's only file. */
static int set_file(struct thread_data *td, const struct freestone_traits *traits)
{
	const char *label = freestone_label(td->io_ops_data);
	struct fio_file *file;
	char *name;

	if (!td->files_index) {
		add_file(td, label, 0, 0);
		td->o.nr_files = 1;
		td->o.open_files++;
	}
	file = td->files[0];
	/* One name for all jobs of a device, so that fio knows that they share its zones. */
	name = smalloc_strdup(label);
	if (!name)
		return ENOMEM;
	sfree(file->file_name);
	file->file_name = name;
	file->filetype = FIO_TYPE_BLOCK;
	file->real_file_size = traits->size;
	return 0;
}

static int on_setup(struct thread_data *td)
{
	struct freestone_traits traits;
	int error;

	/* With another layout, nothing may be written to td either. */
	if (!is_compatible(td))
		return 1;
	error = attach(td);
	if (!error) {
		freestone_traits(td->io_ops_data, &traits);
		error = check(td, &traits);
	}
	if (!error)
		error = set_file(td, &traits);
	if (error) {
		td_verror(td, error, "freestone");
		return 1;
	}
	/* A forked job would have a device of its own. */
	td->o.use_thread = 1;
	/* There is no page cache; fio requires direct I/O for zoned writes. */
	td->o.odirect = 1;
	return 0;
}

/* Runs in the job's thread, after on_setup(), except with create_serialize=0. */
static int on_init(struct thread_data *td)
{
	int error;

	if (!is_compatible(td))
		return 1;
	if (!td->io_ops_data && !td->o.use_thread) {
		say("create_serialize=0 needs thread=1: jobs share a device as threads of one process");
		error = EINVAL;
	} else
		error = attach(td);
	if (error) {
		td_verror(td, error, "freestone");
		return 1;
	}
	return 0;
}

static void on_cleanup(struct thread_data *td)
{
	if (td->io_ops_data)
		freestone_detach(td->io_ops_data);
	td->io_ops_data = NULL;
}

/* Does nothing: the device is already open. */
static int on_file(struct thread_data *td, struct fio_file *file)
{
	(void) td;
	(void) file;
	return 0;
}

/* ---- requests ---- */

static enum fio_q_status failed(struct io_u *io_u, int error)
{
	io_u->error = error;
	return FIO_Q_COMPLETED;
}

static enum fio_q_status on_queue(struct thread_data *td, struct io_u *io_u)
{
	enum freestone_op op;
	uint64_t offset = io_u->offset, len = io_u->xfer_buflen;
	bool fua = false;
	int ret;

	fio_ro_check(td, io_u);
	/* The device's time starts here, also for requests that complete inline. */
	if (fio_fill_issue_time(td)) {
		fio_gettime(&io_u->issue_time, NULL);
		if (td->o.read_iolog_file)
			td->last_issue = io_u->issue_time;
	}
	switch (io_u->ddir) {
	case DDIR_READ:
		op = FREESTONE_READ;
		break;
	case DDIR_WRITE:
		op = FREESTONE_WRITE;
		fua = td->o.sync_io != 0;
		break;
	case DDIR_TRIM:
		if (td->o.zone_mode == ZONE_MODE_ZBD) {
			ret = zbd_do_io_u_trim(td, io_u);
			if (ret == io_u_completed)
				return FIO_Q_COMPLETED;
			if (ret)
				return failed(io_u, ret < 0 ? -ret : EIO);
		}
		op = FREESTONE_DISCARD;
		break;
	default:
		if (!ddir_sync(io_u->ddir))
			return failed(io_u, EOPNOTSUPP);
		op = FREESTONE_FLUSH;
		offset = len = 0;
	}
	ret = freestone_queue(td->io_ops_data, op, fua, offset, io_u->xfer_buf, len, io_u);
	if (ret == FREESTONE_QUEUED)
		return FIO_Q_QUEUED;
	return failed(io_u, ret);
}

/* While a job waits for events, fio signals only termination; the job must check its runtime itself. */
static bool is_ending(void *context)
{
	const struct thread_data *td = context;

	return td->terminate ||
	       (td->o.timeout && utime_since_now(&td->epoch) >= td->o.timeout + td->o.ramp_time);
}

static int on_getevents(struct thread_data *td, unsigned int min, unsigned int max, const struct timespec *timeout)
{
	int64_t ns = timeout ? timeout->tv_sec * 1000000000LL + timeout->tv_nsec : -1;
	int ret;

	ret = freestone_getevents(td->io_ops_data, min, max, ns, is_ending, td);
	/* fio does not convert the negative errno to an error of the job. */
	if (ret < 0 && !td->error)
		td_verror(td, -ret, "freestone: requests hang");
	return ret;
}

static struct io_u *on_event(struct thread_data *td, int event)
{
	int error = 0;
	struct io_u *io_u = freestone_event(td->io_ops_data, event, &error);

	if (!io_u)
		return NULL;
	io_u->error = error;
	/* fio checks the error of a flush only if it completes inline. */
	if (error && ddir_sync(io_u->ddir) && !td->error)
		td_verror(td, error, "flush");
	return io_u;
}

#ifdef FREESTONE_FIO_CANCEL
static int on_cancel(struct thread_data *td, struct io_u *io_u)
{
	return freestone_cancel(td->io_ops_data, io_u);
}
#endif

/* ---- zones ---- */

static int set_errno(int error)
{
	/* fio prints errno. */
	errno = error;
	return -error;
}

static int on_zoned_model(struct thread_data *td, struct fio_file *file, enum zbd_zoned_model *model)
{
	struct freestone_traits traits;

	(void) file;
	freestone_traits(td->io_ops_data, &traits);
	*model = traits.zoned ? ZBD_HOST_MANAGED : ZBD_NONE;
	return 0;
}

struct report {
	struct zbd_zone *rows;
	unsigned int count;
};

static void on_row(void *context, uint64_t start, uint64_t len, uint64_t capacity, uint64_t write_pointer,
		   unsigned int type, unsigned int condition)
{
	struct report *report = context;

	report->rows[report->count++] = (struct zbd_zone) {
		.start = start,
		.len = len,
		.capacity = capacity,
		.wp = write_pointer,
		.type = type,
		.cond = condition,
	};
}

static int on_report_zones(struct thread_data *td, struct fio_file *file, uint64_t offset, struct zbd_zone *zones,
			   unsigned int max)
{
	struct report report = { .rows = zones };
	int error = freestone_report_zones(td->io_ops_data, offset, max, &report, on_row);

	(void) file;
	return error ? set_errno(error) : (int) report.count;
}

static int on_reset_wp(struct thread_data *td, struct fio_file *file, uint64_t offset, uint64_t length)
{
	int error = freestone_change_zones(td->io_ops_data, false, offset, length);

	(void) file;
	return error ? set_errno(error) : 0;
}

static int on_max_open_zones(struct thread_data *td, struct fio_file *file, unsigned int *max_open_zones)
{
	struct freestone_traits traits;
	uint32_t max;

	(void) file;
	freestone_traits(td->io_ops_data, &traits);
	max = traits.max_open_zones;
#ifndef FREESTONE_FIO_MAX_ACTIVE_ZONES
	/* Zones that fio leaves partly written stay active. */
	if (traits.max_active_zones && (!max || traits.max_active_zones < max))
		max = traits.max_active_zones;
#endif
	/* fio supports no more; a smaller limit than the device's is always valid. */
	*max_open_zones = max < ZBD_MAX_OPEN_ZONES ? max : ZBD_MAX_OPEN_ZONES;
	return 0;
}

#ifdef FREESTONE_FIO_MAX_ACTIVE_ZONES
static int on_max_active_zones(struct thread_data *td, struct fio_file *file, unsigned int *max_active_zones)
{
	struct freestone_traits traits;

	(void) file;
	freestone_traits(td->io_ops_data, &traits);
	*max_active_zones = traits.max_active_zones;
	return 0;
}
#endif

#ifdef FREESTONE_FIO_FINISH_ZONE
static int on_finish_zone(struct thread_data *td, struct fio_file *file, uint64_t offset, uint64_t length)
{
	int error = freestone_change_zones(td->io_ops_data, true, offset, length);

	(void) file;
	return error ? set_errno(error) : 0;
}
#endif

/* ---- the engine ---- */

static struct ioengine_ops engine = {
	.name = "freestone",
	.version = FIO_IOOPS_VERSION,
	/* FIO_NO_OFFLOAD: io_submit_mode=offload is unreliable with events (by fio's own documentation), and hangs with its own engines. */
	.flags = FIO_DISKLESSIO | FIO_NOEXTEND | FIO_NODISKUTIL | FIO_NO_OFFLOAD | FIO_ASYNCIO_SETS_ISSUE_TIME,
	.setup = on_setup,
	.init = on_init,
	.queue = on_queue,
	.getevents = on_getevents,
	.event = on_event,
#ifdef FREESTONE_FIO_CANCEL
	.cancel = on_cancel,
#endif
	.cleanup = on_cleanup,
	.open_file = on_file,
	.close_file = on_file,
	.invalidate = on_file,
	.unlink_file = on_file,
	.get_zoned_model = on_zoned_model,
	.report_zones = on_report_zones,
	.reset_wp = on_reset_wp,
	.get_max_open_zones = on_max_open_zones,
#ifdef FREESTONE_FIO_MAX_ACTIVE_ZONES
	.get_max_active_zones = on_max_active_zones,
#endif
#ifdef FREESTONE_FIO_FINISH_ZONE
	.finish_zone = on_finish_zone,
#endif
	.option_struct_size = sizeof(struct options),
	.options = options,
};

struct ioengine_ops *freestone_engine(void)
{
	return &engine;
}
