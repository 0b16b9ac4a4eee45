/* A few helper threads that nobody ever waits for unless they are at work.
 *
 * The caller cuts a job into pieces and takes piece after piece itself; helpers that are awake take some of them. A
 * helper that the system has put aside for a busy neighbour takes none, and the caller is simply done later. (The
 * barrier at the end of an OpenMP region waits for every thread: next to one busy process that was a scheduler tick,
 * 8 ms, for a product of 0.1 ms.) Helpers look for work for a moment after the last piece, then sleep. */
#pragma once
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#define MOST_HELPERS 255
#define AWAKE_NS 200000 /* between two products of one token lies less */
#ifndef POLITE_NS
#define POLITE_NS 40000 /* after this long without work, whoever else wants the processor goes first */
#endif

typedef void work(const void *job, int64_t from, int64_t to);

static struct {
    pthread_mutex_t busy; /* one job at a time: a caller that finds the team at work works alone */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    atomic_int sleeping, helpers, wanted;
    _Atomic(work *) run;
    _Atomic(const void *) job;
    _Atomic int64_t size, piece;
    _Atomic uint64_t next; /* number of the job << 32 | its next piece: both change in one step */
    _Atomic uint32_t done; /* pieces */
} team = {.busy = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static inline void breathe(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

#define CLOSED 0xffffffffu /* as the next piece: the job's data are being exchanged for another's */

/* Takes pieces of job `number` until none is left. What is read about the job belongs to it if the exchange succeeds:
 * `next` was not closed since, and the job's data stay until the last piece is done. */
static void take_pieces(uint32_t number) {
    for (;;) {
        uint64_t at = atomic_load(&team.next);
        work *run = atomic_load(&team.run);
        const void *job = atomic_load(&team.job);
        int64_t size = atomic_load(&team.size), piece = atomic_load(&team.piece), from = (int64_t)(uint32_t)at * piece;
        if (at >> 32 != number || (uint32_t)at == CLOSED || from >= size) return;
        if (!atomic_compare_exchange_weak(&team.next, &at, at + 1)) continue;
        run(job, from, from + piece < size ? from + piece : size);
        atomic_fetch_add(&team.done, 1);
    }
}

/* Returns the number of the first job that is not `seen`: looks for a moment, then sleeps. */
static uint32_t wait_for_job(uint32_t seen) {
    for (int64_t start = now_ns(), idle = 0; idle < AWAKE_NS; idle = now_ns() - start) {
        for (int i = 0; i < 64; i++, breathe())
            if (atomic_load(&team.next) >> 32 != seen) return (uint32_t)(atomic_load(&team.next) >> 32);
        if (idle > POLITE_NS) sched_yield();
    }
    pthread_mutex_lock(&team.lock);
    atomic_fetch_add(&team.sleeping, 1);
    while (atomic_load(&team.next) >> 32 == seen) pthread_cond_wait(&team.wake, &team.lock);
    atomic_fetch_sub(&team.sleeping, 1);
    pthread_mutex_unlock(&team.lock);
    return (uint32_t)(atomic_load(&team.next) >> 32);
}

static void *help(void *argument) {
    const int number = (int)(intptr_t)argument;
    for (uint32_t seen = 0;;) {
        seen = wait_for_job(seen);
        if (number < atomic_load(&team.wanted)) take_pieces(seen);
    }
    return NULL;
}

/* In a child process there are no helpers, and what they held is free. */
static void forget_helpers(void) {
    pthread_mutex_init(&team.busy, NULL);
    pthread_mutex_init(&team.lock, NULL);
    pthread_cond_init(&team.wake, NULL);
    atomic_store(&team.helpers, 0);
    atomic_store(&team.sleeping, 0);
}

/* Helpers start when first wanted and leave signals to the program's own threads. */
static void start_helpers(int wanted) {
    static int forks_watched;
    if (!forks_watched) forks_watched = !pthread_atfork(NULL, NULL, forget_helpers);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = atomic_load(&team.helpers); i < wanted; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, (void *)(intptr_t)i)) break;
        pthread_detach(thread);
        atomic_store(&team.helpers, i + 1);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void lead(work *run, const void *job, int64_t size, int64_t piece, int wanted) {
    const uint32_t pieces = (uint32_t)((size + piece - 1) / piece);
    uint32_t number = (uint32_t)(atomic_load(&team.next) >> 32) + 1;
    /* A helper that has read the last job's place and not yet its size must not take the next one's for it. */
    atomic_store(&team.next, (uint64_t)(number - 1) << 32 | CLOSED);
    atomic_store(&team.run, run);
    atomic_store(&team.job, job);
    atomic_store(&team.size, size);
    atomic_store(&team.piece, piece);
    atomic_store(&team.wanted, wanted);
    atomic_store(&team.done, 0);
    atomic_store(&team.next, (uint64_t)number << 32);
    if (atomic_load(&team.sleeping)) {
        pthread_mutex_lock(&team.lock);
        pthread_cond_broadcast(&team.wake);
        pthread_mutex_unlock(&team.lock);
    }
    take_pieces(number);
    for (int i = 0; atomic_load(&team.done) < pieces; i++)
        if (i < 1000) breathe();
        else sched_yield(); /* a helper may wait for this very processor */
}

/* run(job, from, to) over all of 0..size in pieces, by up to `threads` threads. */
static void share(work *run, const void *job, int64_t size, int64_t piece, int threads) {
    int wanted = threads - 1 < MOST_HELPERS ? threads - 1 : MOST_HELPERS;
    if (wanted < 1 || size <= piece || pthread_mutex_trylock(&team.busy)) {
        if (size > 0) run(job, 0, size);
        return;
    }
    if (atomic_load(&team.helpers) < wanted) start_helpers(wanted);
    lead(run, job, size, piece, wanted);
    pthread_mutex_unlock(&team.busy);
}
