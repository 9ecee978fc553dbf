/* A fake of the functions of librados and librbd that freestone-rbd uses. Images are files in a directory, which
 * the configuration names (`root = DIR`). Every call reads DIR/control: a line `hang CALL` blocks the call until the
 * line is removed, `fail CALL ERRNO` makes it fail. Calls are logged to DIR/log. Misuse of the API aborts. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define WORKERS 3
#define BLOCK 4096

struct cluster { char root[400]; int connected; int pools; };
struct pool { struct cluster *cluster; char name[100]; char space[100]; int images; };
typedef void (*callback)(void *, void *);
struct completion { callback done; void *arg; long result; };
struct op { struct op *next; const char *name; int kind; uint64_t off, len; char *data; int flags; struct completion *completion; };
enum { READ, WRITE, DISCARD, ZEROES, FLUSH };
struct image {
  struct pool *pool; int file, read_only, snap; long in_flight; int ending;
  pthread_mutex_t lock, disk, calls; pthread_cond_t more; struct op *first, *last; pthread_t workers[WORKERS];
  pthread_t watcher; void (*update)(void *); void *update_arg; volatile int watching; uint64_t seen;
};
struct info { uint64_t size, object, objects; int order; char prefix[24]; int64_t parent; char parent_name[96]; };
static long completions;

static void require(int holds, const char *what) { if (!holds) { fprintf(stderr, "fake librbd: %s\n", what); abort(); } }
static void sleep_ms(int ms) { usleep(ms * 1000); }

static void log_line(struct cluster *c, const char *line) {
  char path[500]; snprintf(path, sizeof path, "%s/log", c->root);
  int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  char text[300]; int n = snprintf(text, sizeof text, "%s\n", line);
  if (file >= 0) { require(write(file, text, n) == n, "the log is full"); close(file); } }

/* Returns 0, a negative errno, or 1 to hang. */
static int control_for(struct cluster *c, const char *call) {
  char path[500], what[20], which[40]; int number = 0, result_code = 0;
  snprintf(path, sizeof path, "%s/control", c->root);
  FILE *file = fopen(path, "re");
  if (!file) return 0;
  char line[200];
  while (fgets(line, sizeof line, file)) {
    int n = sscanf(line, "%19s %39s %d", what, which, &number);
    if (n < 2 || strcmp(which, call)) continue;
    result_code = !strcmp(what, "hang") ? 1 : -number; }
  fclose(file);
  return result_code; }
static int wait_allowed(struct cluster *c, const char *call) {
  int result_code;
  log_line(c, call);
  while ((result_code = control_for(c, call)) == 1) sleep_ms(2);
  return result_code; }

int rados_create(void **out, const char *id) {
  struct cluster *c = calloc(1, sizeof *c);
  (void)id; *out = c; return 0; }
int rados_conf_read_file(void *handle, const char *path) {
  struct cluster *c = handle; char line[500];
  if (!path) path = getenv("CEPH_CONF");
  FILE *file = path ? fopen(path, "re") : NULL;
  if (!file) return -ENOENT;
  while (fgets(line, sizeof line, file)) sscanf(line, " root = %399s", c->root);
  fclose(file);
  return c->root[0] ? 0 : -EINVAL; }
int rados_conf_set(void *handle, const char *name, const char *value) {
  char line[200]; snprintf(line, sizeof line, "set %s %s", name, value);
  log_line(handle, line);
  return strncmp(name, "client_", 7) && strncmp(name, "rados_", 6) && strcmp(name, "rbd_cache") ? -ENOENT : 0; }
int rados_conf_get(void *handle, const char *name, char *value, size_t size) {
  (void)handle;
  if (strcmp(name, "rbd_discard_granularity_bytes")) return -ENOENT;
  return snprintf(value, size, "%d", BLOCK) < (int)size ? 0 : -ENAMETOOLONG; }
int rados_connect(void *handle) {
  struct cluster *c = handle; int r = wait_allowed(c, "connect");
  c->connected = r == 0; return r; }
void rados_shutdown(void *handle) {
  struct cluster *c = handle;
  require(c->pools == 0, "a pool is open at shutdown");
  if (c->root[0]) log_line(c, "shutdown");
  free(c); }
int rados_ioctx_create(void *handle, const char *name, void **out) {
  struct cluster *c = handle;
  require(c->connected, "not connected");
  if (strcmp(name, "rbd")) return -ENOENT;
  struct pool *p = calloc(1, sizeof *p);
  p->cluster = c; c->pools++; snprintf(p->name, sizeof p->name, "%s", name); *out = p; return 0; }
void rados_ioctx_set_namespace(void *handle, const char *space) {
  struct pool *p = handle; snprintf(p->space, sizeof p->space, "%s", space); }
void rados_ioctx_destroy(void *handle) {
  struct pool *p = handle;
  require(p->images == 0, "an image is open when its pool is closed");
  p->cluster->pools--; free(p); }

static uint64_t size_of(struct image *i) { struct stat s; require(fstat(i->file, &s) == 0, "stat"); return s.st_size; }
static long punch(struct image *i, uint64_t from, uint64_t to) {
  if (to <= from) return 0;
  return fallocate(i->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, from, to - from) ? -errno : 0; }

static long perform(struct image *i, struct op *op) {
  int result_code = wait_allowed(i->pool->cluster, op->name);
  char line[200];
  if (result_code < 0) return result_code;
  snprintf(line, sizeof line, "did %s %llu %llu %d", op->name, (unsigned long long)op->off, (unsigned long long)op->len, op->flags);
  log_line(i->pool->cluster, line);
  if (op->kind != READ && op->kind != FLUSH && i->read_only) return -EROFS;
  if (op->kind == FLUSH) return 0;
  pthread_mutex_lock(&i->disk);
  long result = 0;
  uint64_t size = size_of(i), len = op->len;
  /* Clipped at the end of the image. */
  if (op->off >= size) result = -EINVAL;
  else if (op->off + len > size) len = size - op->off;
  if (result == 0) switch (op->kind) {
    case READ: result = pread(i->file, op->data, len, op->off); break;
    case WRITE: result = pwrite(i->file, op->data, len, op->off) == (ssize_t)len ? 0 : -EIO; break;
    case DISCARD: result = punch(i, (op->off + BLOCK - 1) / BLOCK * BLOCK, (op->off + len) / BLOCK * BLOCK); break;
    case ZEROES:
      if (!(op->flags & 1)) { result = punch(i, op->off, op->off + len); break; }
      char *zeroes = calloc(1, len);
      result = pwrite(i->file, zeroes, len, op->off) == (ssize_t)len ? 0 : -EIO;
      free(zeroes); }
  pthread_mutex_unlock(&i->disk);
  return result; }

static void *work(void *arg) {
  struct image *i = arg;
  for (;;) {
    pthread_mutex_lock(&i->lock);
    while (!i->first && !i->ending) pthread_cond_wait(&i->more, &i->lock);
    struct op *op = i->first;
    if (op) { i->first = op->next; if (!i->first) i->last = NULL; }
    pthread_mutex_unlock(&i->lock);
    if (!op) return NULL;
    op->completion->result = perform(i, op);
    struct completion *c = op->completion;
    free(op);
    /* Before the callback, since another thread may close the image once it runs. */
    __atomic_sub_fetch(&i->in_flight, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_lock(&i->calls);
    c->done(c, c->arg);
    pthread_mutex_unlock(&i->calls); } }

static int open_image(void *handle, const char *name, void **out, const char *snap, int read_only) {
  struct pool *p = handle; char path[900];
  int r = wait_allowed(p->cluster, "open");
  if (r < 0) return r;
  snprintf(path, sizeof path, "%s/%s%s%s.%s%s%s", p->cluster->root, p->name, p->space[0] ? "." : "", p->space, name, snap ? "@" : "", snap ? snap : "");
  int file = open(path, (read_only || snap ? O_RDONLY : O_RDWR) | O_CLOEXEC);
  if (file < 0) return -errno;
  struct image *i = calloc(1, sizeof *i);
  i->pool = p; p->images++; i->file = file; i->read_only = read_only || snap;
  pthread_mutex_init(&i->lock, NULL); pthread_mutex_init(&i->disk, NULL); pthread_mutex_init(&i->calls, NULL);
  pthread_cond_init(&i->more, NULL);
  for (int n = 0; n < WORKERS; n++) require(pthread_create(&i->workers[n], NULL, work, i) == 0, "no thread");
  *out = i; return 0; }
int rbd_open(void *p, const char *name, void **out, const char *snap) { return open_image(p, name, out, snap, 0); }
int rbd_open_read_only(void *p, const char *name, void **out, const char *snap) { return open_image(p, name, out, snap, 1); }
int rbd_close(void *handle) {
  struct image *i = handle; struct cluster *c = i->pool->cluster;
  require(__atomic_load_n(&i->in_flight, __ATOMIC_SEQ_CST) == 0, "an image is closed with requests under way");
  require(!i->watching, "an image is closed with a watch");
  int r = wait_allowed(c, "close");
  pthread_mutex_lock(&i->lock); i->ending = 1; pthread_cond_broadcast(&i->more); pthread_mutex_unlock(&i->lock);
  for (int n = 0; n < WORKERS; n++) {
    require(!pthread_equal(i->workers[n], pthread_self()), "an image is closed by a callback");
    pthread_join(i->workers[n], NULL); }
  require(__atomic_load_n(&completions, __ATOMIC_SEQ_CST) >= 0, "a completion was released twice");
  close(i->file); i->pool->images--; free(i);
  log_line(c, "closed");
  return r; }
int rbd_stat(void *handle, struct info *info, size_t size) {
  struct image *i = handle;
  require(size == sizeof *info, "another layout of rbd_image_info_t");
  int r = wait_allowed(i->pool->cluster, "stat");
  info->size = size_of(i); info->object = 1 << 20; info->order = 20; return r; }

/* More options than the caller's first array holds; rbd_cache is the last. `fail rbd_cache N` turns it on. */
#define OPTIONS 300
struct option { char *name, *value; int source; };
int rbd_config_image_list(void *handle, struct option *options, int *count) {
  struct image *i = handle; int room = *count;
  *count = OPTIONS;
  if (room < OPTIONS) return -ERANGE;
  for (int n = 0; n < OPTIONS; n++) options[n] = (struct option){ strdup("rbd_other"), strdup("7"), 0 };
  struct option *last = &options[OPTIONS - 1];
  free(last->name); free(last->value);
  last->name = strdup("rbd_cache"); last->value = strdup(control_for(i->pool->cluster, "rbd_cache") ? "true" : "false");
  return 0; }
void rbd_config_image_list_cleanup(struct option *options, int count) {
  require(count == OPTIONS, "another number of options");
  for (int n = 0; n < count; n++) { free(options[n].name); free(options[n].value); } }

static void *watch(void *arg) {
  struct image *i = arg;
  while (i->watching) { sleep_ms(2); uint64_t size = size_of(i); if (size != i->seen) { i->seen = size; i->update(i->update_arg); } }
  return NULL; }
int rbd_update_watch(void *handle, uint64_t *number, void (*update)(void *), void *arg) {
  struct image *i = handle;
  i->update = update; i->update_arg = arg; i->watching = 1; i->seen = size_of(i); *number = 7;
  return -pthread_create(&i->watcher, NULL, watch, i); }
int rbd_update_unwatch(void *handle, uint64_t number) {
  struct image *i = handle;
  require(number == 7 && i->watching, "there is no such watch");
  i->watching = 0; pthread_join(i->watcher, NULL); return 0; }

int rbd_diff_iterate2(void *handle, const char *from, uint64_t off, uint64_t len, uint8_t parent, uint8_t whole,
                      int (*cb)(uint64_t, size_t, int, void *), void *arg) {
  struct image *i = handle; uint64_t end = off + len; char line[100];
  require(!from && parent && !whole, "another difference");
  int r = wait_allowed(i->pool->cluster, "diff");
  if (r < 0) return r;
  snprintf(line, sizeof line, "did diff %llu %llu", (unsigned long long)off, (unsigned long long)len);
  log_line(i->pool->cluster, line);
  while (off < end) {
    off_t data = lseek(i->file, off, SEEK_DATA);
    if (data < 0 || (uint64_t)data >= end) return 0;
    off_t hole = lseek(i->file, data, SEEK_HOLE);
    uint64_t stop = (uint64_t)hole < end ? (uint64_t)hole : end;
    if ((r = cb(data, stop - data, 1, arg)) < 0) return r;
    off = stop; }
  return 0; }

int rbd_aio_create_completion(void *arg, callback done, void **out) {
  struct completion *c = calloc(1, sizeof *c);
  c->done = done; c->arg = arg; *out = c;
  __atomic_add_fetch(&completions, 1, __ATOMIC_SEQ_CST); return 0; }
ssize_t rbd_aio_get_return_value(void *handle) { return ((struct completion *)handle)->result; }
void rbd_aio_release(void *handle) { __atomic_sub_fetch(&completions, 1, __ATOMIC_SEQ_CST); free(handle); }

static int begin(struct image *i, int kind, const char *name, uint64_t off, uint64_t len, char *data, int flags, void *completion) {
  char call[40]; snprintf(call, sizeof call, "begin-%s", name);
  int result_code = control_for(i->pool->cluster, call);
  if (result_code < 0) return result_code;
  struct op *op = calloc(1, sizeof *op);
  *op = (struct op){ .name = name, .kind = kind, .off = off, .len = len, .data = data, .flags = flags, .completion = completion };
  __atomic_add_fetch(&i->in_flight, 1, __ATOMIC_SEQ_CST);
  pthread_mutex_lock(&i->lock);
  require(!i->ending, "a request comes after the image is closed");
  if (i->last) i->last->next = op; else i->first = op;
  i->last = op; pthread_cond_signal(&i->more); pthread_mutex_unlock(&i->lock); return 0; }
int rbd_aio_read(void *i, uint64_t off, size_t len, char *data, void *c) { return begin(i, READ, "read", off, len, data, 0, c); }
int rbd_aio_write(void *i, uint64_t off, size_t len, const char *data, void *c) { return begin(i, WRITE, "write", off, len, (char *)data, 0, c); }
int rbd_aio_discard(void *i, uint64_t off, uint64_t len, void *c) { return begin(i, DISCARD, "discard", off, len, NULL, 0, c); }
#ifndef OLD
int rbd_aio_write_zeroes(void *i, uint64_t off, size_t len, void *c, int flags, int op_flags) {
  require(op_flags == 0, "another flag"); return begin(i, ZEROES, "zeroes", off, len, NULL, flags, c); }
#endif
int rbd_aio_flush(void *i, void *c) { return begin(i, FLUSH, "flush", 0, 0, NULL, 0, c); }
