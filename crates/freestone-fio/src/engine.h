/*
 * What the C and the Rust half of the engine call one another. The C half knows fio's structures and keeps nothing;
 * the Rust half knows devices and nothing of fio. The Rust side of these declarations is in abi.rs.
 */
#ifndef FREESTONE_FIO_ENGINE_H
#define FREESTONE_FIO_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

/* A job's place at a device. Only the job's own thread uses it. */
struct freestone_job;

struct freestone_traits {
	/* Bytes. */
	uint64_t size;
	/* Bytes. */
	uint32_t logical_block;
	/* Zones that may be open, or open or closed, at once; 0 is no limit. */
	uint32_t max_open_zones;
	uint32_t max_active_zones;
	uint8_t zoned;
	uint8_t read_only;
};

enum freestone_op {
	FREESTONE_READ,
	FREESTONE_WRITE,
	FREESTONE_DISCARD,
	FREESTONE_FLUSH,
};

/* Of freestone_queue(): answered later. Other answers are 0 (done) or a positive errno. */
#define FREESTONE_QUEUED (-1)

/* Hands over a sentence for the user. */
typedef void freestone_say(const char *sentence);
typedef bool freestone_is_ending(void *context);
/* Hands over one zone; type and condition are numbered as in the zoned block standards. */
typedef void freestone_row(void *context, uint64_t start, uint64_t len, uint64_t capacity, uint64_t write_pointer,
			   unsigned int type, unsigned int condition);

/*
 * Opens the device that the words describe, or joins the jobs that have it. `users` is how many jobs of this run will
 * come for it. Returns a positive errno after saying why, or 0.
 */
int freestone_attach(const char *words, unsigned int users, struct freestone_job **job, freestone_say *say);
void freestone_detach(struct freestone_job *job);

void freestone_traits(const struct freestone_job *job, struct freestone_traits *traits);

/* What fio is to call the device: one name for one device. Lives as long as the job. */
const char *freestone_label(const struct freestone_job *job);

/* The buffer stays the caller's; where the answer is FREESTONE_QUEUED it must live until the event or the cancellation. */
int freestone_queue(struct freestone_job *job, enum freestone_op op, bool fua, uint64_t offset, void *buffer, uint64_t len,
		    void *token);
/*
 * `timeout_ns` below 0 is none. A job that is ending does not wait for long. Returns how many events there are, or a
 * negative errno.
 */
int freestone_getevents(struct freestone_job *job, unsigned int min, unsigned int max, int64_t timeout_ns,
			freestone_is_ending *is_ending, void *context);
/* The token of one of the events of the last freestone_getevents(), and a positive errno or 0. */
void *freestone_event(const struct freestone_job *job, unsigned int event, int *error);
/* 0: forgotten, and its buffer is touched no more. ENOENT: it is not on its way. */
int freestone_cancel(struct freestone_job *job, void *token);

/* Rows from the zone that holds `offset` on, at most `most`. Returns a positive errno or 0. */
int freestone_report_zones(const struct freestone_job *job, uint64_t offset, unsigned int most, void *context,
			   freestone_row *row);
/* Resets or finishes the zones that start in the range. Returns a positive errno or 0. */
int freestone_change_zones(const struct freestone_job *job, bool finish, uint64_t offset, uint64_t len);

#endif
