/* zone_guest.c - runs in the kernel lab (see run-zones.sh): runs a script of crates/freestone/examples/zone_lab.rs on the kernel's
 * null_blk and prints the results, one or more lines for each line of the script. Offsets and lengths are in bytes.
 *
 *   device KEY=VALUE..        removes the last device, makes a new one with these configfs attributes and powers it on; prints its limits
 *                             from sysfs. `append=1` and `bad=1` are not attributes: `append` puts an NVMe target in front of the
 *                             device, `bad` is only for the generator of scripts.
 *   write OFFSET LEN SEED [fua]    read OFFSET LEN    flush    discard OFFSET LEN    zeroes OFFSET LEN
 *   append OFFSET LEN SEED    to the zone that begins there; prints the position of the data, relative to the start of the zone. Linux
 *                             has no system call for appends, so they go through a local NVMe target (nvmet over `loop`).
 *   open|close|finish|reset OFFSET LEN    the zones in that range
 *   report OFFSET COUNT       prints a line for each zone: start, length, write pointer, capacity, type, condition
 *   zone_readonly OFFSET      zone_offline OFFSET     badblocks CHANGE
 *   ranges                    prints the bad blocks: a line for each run, with its first sector and number of sectors
 *   power                     turns the device off and on
 *
 * The program ends with status 1 if the device cannot be set up or controlled: results are then not compared.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/blkzoned.h>
#include <linux/fs.h>
#include <linux/nvme_ioctl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define SECTOR_BYTES 512
#define MAX_REQUEST_BYTES (1 << 20)
#define MAX_ROWS 256
#define UNTOUCHED 0x5A /* fills the buffer before a read, so that bytes that the driver does not write are detected */
#define NULLB "/sys/kernel/config/nullb/lab"
#define NVMET "/sys/kernel/config/nvmet"
#define DISK "/dev/lab"
#define QUEUE "/sys/block/lab/queue/"
#define NAMESPACE "/dev/nvme0n1"

static int disk = -1, controller = -1, powered, zoned;
static uint64_t block;
static unsigned char *buffer;

static _Noreturn void broken(const char *what) {
	fprintf(stderr, "zone_guest: %s: %s\n", what, strerror(errno));
	exit(1);
}

/* Returns 0 or the errno. */
static int put(const char *path, const char *text) {
	int file = open(path, O_WRONLY), error = 0;
	if (file < 0)
		return errno;
	if (write(file, text, strlen(text)) < 0)
		error = errno;
	close(file);
	return error;
}

static int get(const char *path, char *text, size_t size) {
	int file = open(path, O_RDONLY);
	ssize_t got = file < 0 ? -1 : read(file, text, size - 1);
	if (file >= 0)
		close(file);
	text[got < 0 ? 0 : got] = 0;
	return got < 0 ? errno : 0;
}

static void must(const char *path, const char *text) {
	errno = put(path, text);
	if (errno)
		broken(path);
}

static const char *name(int error) { return error ? strerrorname_np(error) : "ok"; }

/* ---- data: the same on both sides -------------------------------------------------------------------------------------- */

static uint64_t mixed(uint64_t x) {
	x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
	return x ^ (x >> 31);
}

static void fill(uint64_t len, uint64_t seed) {
	uint64_t *words = (uint64_t *)buffer;
	for (uint64_t i = 0; i < len / 8; i++)
		words[i] = mixed(seed + i);
}

static uint64_t sum(uint64_t len) {
	const uint64_t *words = (const uint64_t *)buffer;
	uint64_t sum = len;
	for (uint64_t i = 0; i < len / 8; i++)
		sum = (sum ^ words[i]) * UINT64_C(0x9e3779b97f4a7c15), sum ^= sum >> 32;
	return sum;
}

/* ---- an NVMe target in front of the device ------------------------------------------------------------------------------- */

static void target_on(void) {
	mkdir(NVMET "/subsystems/lab", 0755);
	must(NVMET "/subsystems/lab/attr_allow_any_host", "1");
	mkdir(NVMET "/subsystems/lab/namespaces/1", 0755);
	must(NVMET "/subsystems/lab/namespaces/1/device_path", DISK);
	must(NVMET "/subsystems/lab/namespaces/1/enable", "1");
	mkdir(NVMET "/ports/1", 0755);
	must(NVMET "/ports/1/addr_trtype", "loop");
	if (symlink(NVMET "/subsystems/lab", NVMET "/ports/1/subsystems/lab"))
		broken("nvmet");
	must("/dev/nvme-fabrics", "transport=loop,nqn=lab");
	for (int i = 0; i < 500 && (controller = open(NAMESPACE, O_RDWR)) < 0; i++)
		usleep(10000);
	if (controller < 0)
		broken(NAMESPACE);
}

static void target_off(void) {
	close(controller);
	controller = -1;
	must("/sys/class/nvme/nvme0/delete_controller", "1");
	unlink(NVMET "/ports/1/subsystems/lab");
	rmdir(NVMET "/ports/1");
	must(NVMET "/subsystems/lab/namespaces/1/enable", "0");
	rmdir(NVMET "/subsystems/lab/namespaces/1");
	if (rmdir(NVMET "/subsystems/lab"))
		broken("nvmet");
}

/* ---- the device ------------------------------------------------------------------------------------------------------------ */

static void open_disk(void) {
	disk = open(DISK, O_RDWR | O_DIRECT);
	if (disk < 0)
		broken(DISK);
}

static void drop(void) {
	if (controller >= 0)
		target_off();
	if (disk >= 0)
		close(disk);
	disk = -1;
	if (powered)
		must(NULLB "/power", "0");
	powered = 0;
	if (rmdir(NULLB) && errno != ENOENT)
		broken(NULLB);
}

static void attribute(const char *path, const char *label) {
	char text[256];
	errno = get(path, text, sizeof text);
	if (errno)
		broken(path);
	text[strcspn(text, "\n")] = 0;
	printf("%s %s\n", label, text);
}

static void device(char *words) {
	char path[256];
	int error = 0, append = 0;
	drop();
	if (mkdir(NULLB, 0755))
		broken(NULLB);
	zoned = 0;
	for (char *word; (word = strsep(&words, " ")) && !error;) {
		char *value = strchr(word, '=');
		if (!value)
			continue;
		*value++ = 0;
		if (!strcmp(word, "append") || !strcmp(word, "bad")) {
			append |= *word == 'a';
			continue;
		}
		if (!strcmp(word, "zoned"))
			zoned = *value != '0';
		snprintf(path, sizeof path, NULLB "/%s", word);
		error = put(path, value);
		if (error == ENOENT || error == EACCES)
			broken(path);
	}
	if (!error)
		error = put(NULLB "/power", "1");
	printf("%s\n", name(error));
	if (error)
		return;
	powered = 1;
	open_disk();
	static const char *const limits[] = {"logical_block_size", "rotational", "write_cache", "discard_granularity"};
	static const char *const zone_limits[] = {"nr_zones", "chunk_sectors", "max_open_zones", "max_active_zones", "zone_append_max_bytes"};
	unsigned logical;
	if (ioctl(disk, BLKSSZGET, &logical))
		broken("BLKSSZGET");
	block = logical;
	attribute("/sys/block/lab/size", "size");
	for (size_t i = 0; i < sizeof limits / sizeof *limits; i++)
		snprintf(path, sizeof path, QUEUE "%s", limits[i]), attribute(path, limits[i]);
	for (size_t i = 0; zoned && i < sizeof zone_limits / sizeof *zone_limits; i++)
		snprintf(path, sizeof path, QUEUE "%s", zone_limits[i]), attribute(path, zone_limits[i]);
	if (append)
		target_on();
}

static void power(void) {
	close(disk);
	must(NULLB "/power", "0");
	must(NULLB "/power", "1");
	open_disk();
	printf("ok\n");
}

/* ---- requests ---------------------------------------------------------------------------------------------------------------- */

static int report(uint64_t offset, unsigned count, int show) {
	static union {
		struct blk_zone_report header;
		char space[sizeof(struct blk_zone_report) + MAX_ROWS * sizeof(struct blk_zone)];
	} rows;
	rows.header.sector = offset / SECTOR_BYTES;
	rows.header.nr_zones = count < MAX_ROWS ? count : MAX_ROWS;
	rows.header.flags = 0;
	if (ioctl(disk, BLKREPORTZONE, &rows))
		return errno;
	for (unsigned i = 0; show && i < rows.header.nr_zones; i++) {
		const struct blk_zone *zone = &rows.header.zones[i];
		printf("zone %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %u %u\n", (uint64_t)zone->start, (uint64_t)zone->len,
		       (uint64_t)(zone->wp - zone->start), (uint64_t)zone->capacity, zone->type, zone->cond);
	}
	return 0;
}

/* The block layer caches the write pointers of zones. After a failed write it fails every write to the zone until a report updates
 * the cached pointer. */
static void recover(uint64_t offset) {
	if (zoned)
		report(offset, 1, 0);
}

static void write_at(uint64_t offset, uint64_t len, uint64_t seed, int fua) {
	struct iovec data = {buffer, len};
	fill(len, seed);
	ssize_t done = pwritev2(disk, &data, 1, (off_t)offset, fua ? RWF_DSYNC : 0);
	int error = errno;
	if (done == (ssize_t)len)
		printf("ok\n");
	else if (done >= 0)
		printf("short %zd\n", done);
	else
		printf("%s\n", name(error));
	if (done != (ssize_t)len)
		recover(offset);
}

static void read_at(uint64_t offset, uint64_t len) {
	memset(buffer, UNTOUCHED, len);
	ssize_t done = pread(disk, buffer, len, (off_t)offset);
	if (done == (ssize_t)len)
		printf("ok %016" PRIx64 "\n", sum(len));
	else if (done >= 0)
		printf("short %zd\n", done);
	else
		printf("%s\n", name(errno));
}

static void append(uint64_t offset, uint64_t len, uint64_t seed) {
	struct nvme_passthru_cmd64 command = {
		.opcode = 0x7d, .nsid = 1, .addr = (uintptr_t)buffer, .data_len = (uint32_t)len,
		.cdw10 = (uint32_t)(offset / block), .cdw11 = (uint32_t)(offset / block >> 32), .cdw12 = (uint32_t)(len / block - 1),
	};
	fill(len, seed);
	int status = ioctl(controller, NVME_IOCTL_IO64_CMD, &command);
	/* nvmet translates errors to NVMe status codes, which do not identify null_blk's error. */
	if (status == 0)
		printf("ok %" PRIu64 "\n", (uint64_t)command.result * block - offset);
	else
		printf("failed\n"), recover(offset);
}

static int range_call(unsigned long call, uint64_t offset, uint64_t len) {
	uint64_t range[2] = {offset, len};
	return ioctl(disk, call, range) ? errno : 0;
}

static int zone_call(unsigned long call, uint64_t offset, uint64_t len) {
	struct blk_zone_range range = {offset / SECTOR_BYTES, len / SECTOR_BYTES};
	return ioctl(disk, call, &range) ? errno : 0;
}

static int line(char *text) {
	char verb[32], word[64] = "";
	uint64_t a = 0, b = 0, c = 0;
	if (!strncmp(text, "device ", 7))
		return device(text + 7), 1;
	if (sscanf(text, "badblocks %63s", word) == 1)
		return printf("%s\n", name(put(NULLB "/badblocks", word))), 1;
	int words = sscanf(text, "%31s %" SCNu64 " %" SCNu64 " %" SCNu64 " %63s", verb, &a, &b, &c, word);
#define IS(what, count) (!strcmp(verb, what) && words >= (count))
	if (!powered)
		return 0;
	if ((IS("write", 4) || IS("read", 3) || IS("append", 4)) && b > MAX_REQUEST_BYTES)
		return 0;
	if (IS("write", 4))
		return write_at(a, b, c, words == 5 && !strcmp(word, "fua")), 1;
	if (IS("read", 3))
		return read_at(a, b), 1;
	if (IS("append", 4) && controller >= 0)
		return append(a, b, c), 1;
	if (IS("report", 3)) {
		int error = report(a, (unsigned)b, 1);
		return printf("%s\n", name(error)), 1;
	}
	if (IS("ranges", 1)) {
		char text[8192];
		errno = get(NULLB "/badblocks", text, sizeof text);
		if (errno)
			broken("badblocks");
		for (char *rest = text, *row; (row = strsep(&rest, "\n"));)
			if (*row)
				printf("range %s\n", row);
		return printf("ok\n"), 1;
	}
	if (IS("zone_readonly", 2) || IS("zone_offline", 2)) {
		char path[256];
		snprintf(path, sizeof path, NULLB "/%s", verb);
		snprintf(word, sizeof word, "%" PRIu64, a / SECTOR_BYTES);
		printf("%s\n", name(put(path, word)));
		return recover(a), 1;
	}
	if (IS("power", 1))
		return power(), 1;
	int error;
	if (IS("open", 3))
		error = zone_call(BLKOPENZONE, a, b);
	else if (IS("close", 3))
		error = zone_call(BLKCLOSEZONE, a, b);
	else if (IS("finish", 3))
		error = zone_call(BLKFINISHZONE, a, b);
	else if (IS("reset", 3))
		error = zone_call(BLKRESETZONE, a, b);
	else if (IS("discard", 3))
		error = range_call(BLKDISCARD, a, b);
	else if (IS("zeroes", 3)) {
		error = range_call(BLKZEROOUT, a, b);
		recover(a);
	}
	else if (IS("flush", 1))
		error = fdatasync(disk) ? errno : 0;
	else
		return 0;
	printf("%s\n", name(error));
	return 1;
}

int main(void) {
	static char text[1024];
	buffer = mmap(NULL, MAX_REQUEST_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (buffer == MAP_FAILED)
		broken("mmap");
	for (unsigned number = 1; fgets(text, sizeof text, stdin); number++) {
		text[strcspn(text, "\n")] = 0;
		printf("> %s\n", text);
		if (*text && *text != '#' && !line(text)) {
			fprintf(stderr, "zone_guest: line %u is invalid, or invalid in this state: %s\n", number, text);
			return 1;
		}
	}
	drop();
	if (fflush(stdout))
		broken("output");
	return 0;
}
