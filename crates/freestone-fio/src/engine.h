/*
 * Interface between the C and the Rust half of the engine. The C half handles fio's structures and keeps no state; the
 * Rust half handles devices. abi.rs has the Rust side of these declarations.
 */
#ifndef FREESTONE_FIO_ENGINE_H
#define FREESTONE_FIO_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

/* A job on a device. Used only by the job's own thread. */
struct freestone_job;

struct freestone_traits {
	/* Size in bytes. */
	uint64_t size;
	/* Logical block in bytes. */
	uint32_t logical_block;
	/* Maximum number of open zones, and of active (open or closed) zones; 0 is unlimited. */
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

/* Result of freestone_queue(): in flight. Other results are 0 (complete) or a positive errno. */
#define FREESTONE_QUEUED (-1)

/* Prints a message for the user. */
typedef void freestone_say(const char *sentence);
typedef bool freestone_is_ending(void *context);
/* Reports one zone; type and condition are numbered as in the zoned block standards. */
typedef void freestone_row(void *context, uint64_t start, uint64_t len, uint64_t capacity, uint64_t write_pointer,
			   unsigned int type, unsigned int condition);

/*
 * Opens the device of the specification `spec`, or joins the jobs that have it open. `users` is the number of jobs of
 * this run that use it. Returns 0, or a positive errno after printing the reason.
 */
int freestone_attach(const char *spec, unsigned int users, struct freestone_job **job, freestone_say *say);
void freestone_detach(struct freestone_job *job);

void freestone_traits(const struct freestone_job *job, struct freestone_traits *traits);

/* Returns fio's file name for the device, one per device. Lives as long as the job. */
const char *freestone_label(const struct freestone_job *job);

/* The caller owns the buffer. With FREESTONE_QUEUED it must live until the event or the cancellation. */
int freestone_queue(struct freestone_job *job, enum freestone_op op, bool fua, uint64_t offset, void *buffer, uint64_t len,
		    void *token);
/*
 * A negative `timeout_ns` means no timeout. An ending job does not wait long. Returns the number of events, or a
 * negative errno.
 */
int freestone_getevents(struct freestone_job *job, unsigned int min, unsigned int max, int64_t timeout_ns,
			freestone_is_ending *is_ending, void *context);
/* Returns the token of an event of the last freestone_getevents(), and sets a positive errno or 0. */
void *freestone_event(const struct freestone_job *job, unsigned int event, int *error);
/* Returns 0 if the request is cancelled and its buffer not accessed any more, or ENOENT if it is not in flight. */
int freestone_cancel(struct freestone_job *job, void *token);

/* Reports at most `max` zones, from the one that contains `offset` on. Returns 0 or a positive errno. */
int freestone_report_zones(const struct freestone_job *job, uint64_t offset, unsigned int max, void *context,
			   freestone_row *row);
/* Resets or finishes the zones that start in the range. Returns 0 or a positive errno. */
int freestone_change_zones(const struct freestone_job *job, bool finish, uint64_t offset, uint64_t len);

#endif
