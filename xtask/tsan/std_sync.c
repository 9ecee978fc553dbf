/*
 * Describes the synchronisation of the standard library to ThreadSanitizer.
 *
 * The library is not instrumented. The fast paths of its locks are inlined into instrumented code. The slow paths are
 * functions of the library, so ThreadSanitizer does not see what they acquire and release. Without this file, data
 * guarded by a lock that a thread waited for looks racy.
 *
 * xtask finds the mangled names, passes them as macros, and makes the linker wrap the functions (--wrap).
 */
#include <stdbool.h>
#include <stdint.h>

void __tsan_acquire(void *address);
void __tsan_release(void *address);

#define PASTE2(a, b) a##b
#define PASTE(a, b) PASTE2(a, b)
#define REAL(name) PASTE(__real_, name)
#define WRAP(name) PASTE(__wrap_, name)

/* Mutex::lock_contended(&self), RwLock::read_contended(&self), RwLock::write_contended(&self):
 * `self` is the address of the word of the lock, which unlocking releases. */
#define ACQUIRES(name)                                                                                                 \
    void REAL(name)(void *self);                                                                                       \
    void WRAP(name)(void *self)                                                                                        \
    {                                                                                                                  \
        REAL(name)(self);                                                                                              \
        __tsan_acquire(self);                                                                                          \
    }
ACQUIRES(MUTEX_LOCK_CONTENDED)
ACQUIRES(RWLOCK_READ_CONTENDED)
ACQUIRES(RWLOCK_WRITE_CONTENDED)

/* Condvar::wait(&self, &Mutex): unlocks the mutex and locks it again. */
void REAL(CONDVAR_WAIT)(void *self, void *mutex);
void WRAP(CONDVAR_WAIT)(void *self, void *mutex)
{
    __tsan_release(mutex);
    REAL(CONDVAR_WAIT)(self, mutex);
    __tsan_acquire(mutex);
}

/* Condvar::wait_timeout(&self, &Mutex, Duration) -> bool: a Duration is passed as seconds and nanoseconds. */
bool REAL(CONDVAR_WAIT_TIMEOUT)(void *self, void *mutex, uint64_t seconds, uint32_t nanoseconds);
bool WRAP(CONDVAR_WAIT_TIMEOUT)(void *self, void *mutex, uint64_t seconds, uint32_t nanoseconds)
{
    __tsan_release(mutex);
    bool notified = REAL(CONDVAR_WAIT_TIMEOUT)(self, mutex, seconds, nanoseconds);
    __tsan_acquire(mutex);
    return notified;
}

/* Once::call(&self, bool, &mut dyn FnMut(&OnceState)) and the hidden location of its caller: runs the closure or waits
 * until another thread has run it; used by Once, OnceLock and LazyLock. Other threads can see the completion before this
 * function returns, so the release must come at the end of the closure. The closure is called through our own vtable. */
#define VTABLE_WORDS 5 /* drop, size, alignment, call_once, call_mut */
#define CALL_MUT 4

struct closure {
    void *data;
    void **vtable;
    void *once;
};

static void call_mut(struct closure *closure, void *state)
{
    ((void (*)(void *, void *))closure->vtable[CALL_MUT])(closure->data, state);
    __tsan_release(closure->once);
}

void REAL(ONCE_CALL)(void *self, bool ignore_poison, void *closure, void *vtable, void *location);
void WRAP(ONCE_CALL)(void *self, bool ignore_poison, void *data, void **vtable, void *location)
{
    struct closure closure = {data, vtable, self};
    void *ours[VTABLE_WORDS] = {0, (void *)sizeof closure, (void *)_Alignof(struct closure), call_mut, call_mut};
    REAL(ONCE_CALL)(self, ignore_poison, &closure, ours, location);
    __tsan_acquire(self);
}

/* ScopeData::decrement_num_running_threads(&self, bool): called at the end of a thread of thread::scope, which
 * waits for the counter. The counter is one of the three words of `self`. */
void REAL(SCOPE_THREAD_ENDS)(uint64_t *self, bool panicked);
void WRAP(SCOPE_THREAD_ENDS)(uint64_t *self, bool panicked)
{
    for (int word = 0; word < 3; word++)
        __tsan_release(self + word);
    REAL(SCOPE_THREAD_ENDS)(self, panicked);
}

/* The last owner of an Arc frees it after fence(Acquire), which pairs with the Release of the other owners' decrements.
 * ThreadSanitizer does not support fences (the library avoids the fence in instrumented builds, see the macro `acquire!`
 * in alloc/src/sync.rs), so here a decrement with Release also acquires. */
uint64_t __real___tsan_atomic64_fetch_sub(volatile uint64_t *address, uint64_t value, int order);
uint64_t __wrap___tsan_atomic64_fetch_sub(volatile uint64_t *address, uint64_t value, int order)
{
    return __real___tsan_atomic64_fetch_sub(address, value, order == __ATOMIC_RELEASE ? __ATOMIC_ACQ_REL : order);
}
