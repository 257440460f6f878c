/* Jobs for threads of this library, and the mailboxes where they go when they are done. */
#include "helper.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_THREADS = 64 }; /* of each pool */

typedef struct Job Job;

/* Where jobs go when they are done. It lives until its owner has closed it and no job is under way.
 * The symbols are its own: the interpreter, which made them, may end before the last job. */
typedef struct { Symbols symbols; pthread_mutex_t mutex; int descriptor, closed;
                 uint64_t under_way; Job *first, *last, *scans; } Mailbox;

/* The last two are scans: one begins at the start of a range, one goes on with an iterator. */
typedef enum { WRITE, APPEND, SCAN_RANGE, SCAN_ON } JobKind;

struct Job {
    Job *next;
    Job *next_scan; /* of those of the mailbox that are under way */
    Mailbox *mailbox;
    JobKind kind;
    int32_t flags;
    uint64_t handle; /* of the database, the reader or the iterator; an append has none */
    uint64_t range_size, size;
    Scan scan;
    WalSync wal; /* without a folder if there are no files to sync */
    Append to;
    Outcome outcome;
    uint8_t bytes[]; /* rows, or range and options; then the path that belongs to them */
};

/* Writes have threads of their own: they never wait behind reads that get no answer. */
typedef struct { pthread_mutex_t mutex; pthread_cond_t work; Job *first, *last; int idle, threads; }
    Pool;
static Pool write_pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, NULL, 0, 0};
static Pool scan_pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, NULL, 0, 0};

static void append(Job **first, Job **last, Job *job) {
    job->next = NULL;
    if (*last) (*last)->next = job; else *first = job;
    *last = job;
}

static Job *take(Job **first, Job **last) {
    Job *job = *first;
    if (job) *first = job->next;
    if (!*first) *last = NULL;
    return job;
}

static int is_scan(const Job *job) {
    return job->kind == SCAN_RANGE || job->kind == SCAN_ON;
}

/* With the mutex of the mailbox. */
static void forget_scan(Job *job) {
    Job **link = &job->mailbox->scans;
    while (*link != job) link = &(*link)->next_scan;
    *link = job->next_scan;
}

static void free_job(Job *job) {
    const Symbols *s = &job->mailbox->symbols;
    RustCallStatus ignored = {0};
    if (job->kind == APPEND) close(job->to.descriptor);
    else if (job->kind == SCAN_ON) s->free_dbiterator(job->handle, &ignored);
    else if (job->flags & JOB_OF_READER) s->free_dbreader(job->handle, &ignored);
    else s->free_db(job->handle, &ignored);
    free(job);
}

/* Each job, and each call, that counts in `under_way` may use the mailbox; the last one of a closed
 * mailbox frees it. */
static void leave(Mailbox *mailbox) {
    pthread_mutex_lock(&mailbox->mutex);
    const int last_one = !--mailbox->under_way && mailbox->closed;
    pthread_mutex_unlock(&mailbox->mutex);
    if (!last_one) return;
    pthread_mutex_destroy(&mailbox->mutex);
    close(mailbox->descriptor);
    free(mailbox);
}

/* For a job that no caller will take: its buffers and its iterator are ours to free. */
static void discard(Job *job) {
    const Symbols *s = &job->mailbox->symbols;
    RustCallStatus ignored = {0};
    if (job->outcome.rows.data) s->rustbuffer_free(job->outcome.rows, &ignored);
    if (job->outcome.status.error_buf.data)
        s->rustbuffer_free(job->outcome.status.error_buf, &ignored);
    if (job->outcome.iterator) s->free_dbiterator(job->outcome.iterator, &ignored);
    free_job(job);
}

static void deliver(Job *job) {
    Mailbox *mailbox = job->mailbox;
    pthread_mutex_lock(&mailbox->mutex);
    if (is_scan(job)) forget_scan(job);
    const int closed = mailbox->closed;
    if (!closed) {
        const int was_empty = !mailbox->first;
        append(&mailbox->first, &mailbox->last, job);
        /* One byte wakes the loop for all that is there; a full pipe will wake it anyway. */
        if (was_empty) while (write(mailbox->descriptor, "!", 1) < 0 && errno == EINTR) {}
    }
    pthread_mutex_unlock(&mailbox->mutex);
    if (closed) discard(job); /* before we leave: it uses the mailbox */
    leave(mailbox);
}

static void run(Job *job) {
    const Symbols *s = &job->mailbox->symbols;
    Outcome *out = &job->outcome;
    switch (job->kind) {
    case WRITE:
        out->result = write_durably(s, job->handle, job->bytes, job->size, job->flags,
                                    job->wal.folder ? &job->wal : NULL, &out->status);
        out->wal_next = job->wal.next;
        out->error_number = job->wal.error_number;
        break;
    case APPEND:
        out->result = append_record(&job->to, job->bytes, job->size, &out->error_number);
        break;
    case SCAN_RANGE:
        out->result = first_rows(s, &job->scan, job->handle, job->flags, job->bytes, job->range_size,
                                 job->size, out);
        break;
    case SCAN_ON:
        out->result = next_rows(s, &job->scan, job->handle, out);
        break;
    }
}

static void *work(void *of_pool) {
    Pool *pool = of_pool;
    pthread_mutex_lock(&pool->mutex);
    for (;;) {
        Job *job;
        while (!(job = take(&pool->first, &pool->last))) {
            pool->idle++;
            pthread_cond_wait(&pool->work, &pool->mutex);
            pool->idle--;
        }
        pthread_mutex_unlock(&pool->mutex);
        run(job);
        deliver(job);
        pthread_mutex_lock(&pool->mutex);
    }
    return NULL;
}

/* With the mutex of the pool. Threads are never joined: what does not answer must not keep the
 * process from ending. */
static int start_thread(Pool *pool) {
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, before;
    if (pthread_attr_init(&attributes)) return 0;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    /* Signals are for Python's threads: taken here, one would not wake the thread that it is meant for. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(&thread, &attributes, work, pool);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (!failed) pool->threads++;
    return !failed;
}

static int submit(Job *job) {
    Mailbox *mailbox = job->mailbox;
    Pool *pool = is_scan(job) ? &scan_pool : &write_pool;
    pthread_mutex_lock(&mailbox->mutex);
    mailbox->under_way++;
    if (is_scan(job)) {
        job->next_scan = mailbox->scans;
        mailbox->scans = job;
    }
    pthread_mutex_unlock(&mailbox->mutex);
    pthread_mutex_lock(&pool->mutex);
    int waiting = 0;
    for (Job *one = pool->first; one; one = one->next) waiting++;
    int can_run = pool->idle > waiting || pool->threads >= MOST_THREADS || start_thread(pool);
    can_run = can_run || pool->threads; /* then it has to wait for one that is busy */
    if (can_run) {
        append(&pool->first, &pool->last, job);
        pthread_cond_signal(&pool->work);
    }
    pthread_mutex_unlock(&pool->mutex);
    if (can_run) return ODQ_OK;
    pthread_mutex_lock(&mailbox->mutex);
    if (is_scan(job)) forget_scan(job);
    pthread_mutex_unlock(&mailbox->mutex);
    free_job(job);
    leave(mailbox);
    return ODQ_NO_THREAD;
}

static Job *new_job(Mailbox *mailbox, JobKind kind, uint64_t number, uint64_t bytes) {
    Job *job = calloc(1, sizeof *job + bytes);
    if (!job) return NULL;
    job->mailbox = mailbox;
    job->kind = kind;
    job->outcome.number = number;
    job->scan.mutex = &mailbox->mutex;
    return job;
}

/* Submits the job with a handle of its own, once it has one. */
static int submit_with(Job *job, uint64_t (*clone)(uint64_t, RustCallStatus *), uint64_t handle,
                       RustCallStatus *status) {
    job->handle = clone(handle, status);
    if (status->code == CALL_SUCCESS) return submit(job);
    free(job);
    return ODQ_FAILED;
}

/* A mailbox that writes a byte to `descriptor` when there is something in it. The descriptor is the
 * mailbox's from now on. NULL if there is no memory. */
EXPORT Mailbox *odq_mailbox_new(const Symbols *s, int32_t descriptor) {
    Mailbox *mailbox = calloc(1, sizeof *mailbox);
    if (!mailbox) return NULL;
    mailbox->symbols = *s;
    mailbox->descriptor = descriptor;
    pthread_mutex_init(&mailbox->mutex, NULL);
    return mailbox;
}

/* Nothing may be asked of the mailbox after this. Writes that are under way go on to their end. */
EXPORT void odq_mailbox_close(Mailbox *mailbox) {
    Job *job;
    pthread_mutex_lock(&mailbox->mutex);
    mailbox->closed = 1;
    mailbox->under_way++; /* us, until its jobs are discarded */
    for (Job *scan = mailbox->scans; scan; scan = scan->next_scan) give_up(&scan->scan);
    Job *first = mailbox->first;
    mailbox->first = mailbox->last = NULL;
    pthread_mutex_unlock(&mailbox->mutex);
    while ((job = first)) { first = job->next; discard(job); }
    leave(mailbox);
}

/* Moves up to `capacity` outcomes into `out`; returns how many. */
EXPORT uint32_t odq_mailbox_take(Mailbox *mailbox, Outcome *out, uint32_t capacity) {
    uint32_t count = 0;
    Job *jobs = NULL, *last = NULL, *job;
    pthread_mutex_lock(&mailbox->mutex);
    while (count < capacity && (job = take(&mailbox->first, &mailbox->last))) {
        append(&jobs, &last, job);
        out[count++] = job->outcome;
    }
    pthread_mutex_unlock(&mailbox->mutex);
    while ((job = jobs)) { jobs = job->next; free_job(job); }
    return count;
}

/* `odq_write` as a job; rows and folder are copied. ODQ_FAILED: `status` says why there is no job. */
EXPORT int32_t odq_submit_write(Mailbox *mailbox, uint64_t number, uint64_t db, const uint8_t *rows,
                                uint64_t size, int32_t flags, const WalSync *wal,
                                RustCallStatus *status) {
    const size_t folder_size = wal ? strlen(wal->folder) + 1 : 0;
    Job *job = new_job(mailbox, WRITE, number, size + folder_size);
    if (!job) return ODQ_NO_MEMORY;
    job->size = size;
    job->flags = flags;
    if (size) memcpy(job->bytes, rows, size);
    if (wal) {
        job->wal = *wal;
        job->wal.folder = memcpy(job->bytes + size, wal->folder, folder_size);
    }
    return submit_with(job, mailbox->symbols.clone_db, db, status);
}

/* A record to a journal as a job: `head`, then `rows`. All is copied, the descriptor too: should it be
 * closed before the job is done, its number may soon be that of another file. ODQ_NOT_WRITTEN: there
 * is no job, and `error_number` says why. */
EXPORT int32_t odq_submit_append(Mailbox *mailbox, uint64_t number, const Append *to,
                                 const uint8_t *head, uint64_t head_size, const uint8_t *rows,
                                 uint64_t size, int32_t *error_number) {
    const size_t next_size = strlen(to->next) + 1;
    Job *job = new_job(mailbox, APPEND, number, head_size + size + next_size);
    if (!job) return ODQ_NO_MEMORY;
    job->size = head_size + size;
    memcpy(job->bytes, head, head_size);
    memcpy(job->bytes + head_size, rows, size);
    job->to = *to;
    job->to.next = memcpy(job->bytes + job->size, to->next, next_size);
    job->to.descriptor = fcntl(to->descriptor, F_DUPFD_CLOEXEC, 0);
    if (job->to.descriptor >= 0) return submit(job);
    *error_number = errno;
    free(job);
    return ODQ_NOT_WRITTEN;
}

/* The first `limit` rows of a range of a database, or of a reader's, as a job; fewer if they have
 * `max_bytes` before. `bytes` has the range and then the options, as uniffi
 * serialises them. */
EXPORT int32_t odq_submit_scan(Mailbox *mailbox, uint64_t number, uint64_t handle, int32_t flags,
                               const uint8_t *bytes, uint64_t range_size, uint64_t size,
                               uint32_t limit, uint64_t max_bytes, RustCallStatus *status) {
    const Symbols *s = &mailbox->symbols;
    Job *job = new_job(mailbox, SCAN_RANGE, number, size);
    if (!job) return ODQ_NO_MEMORY;
    job->flags = flags;
    job->range_size = range_size;
    job->size = size;
    job->scan.limit = limit;
    job->scan.max_bytes = max_bytes;
    memcpy(job->bytes, bytes, size);
    return submit_with(job, flags & JOB_OF_READER ? s->clone_dbreader : s->clone_db, handle, status);
}

/* The next `limit` rows of an iterator as a job; `max_bytes` as above. */
EXPORT int32_t odq_submit_next(Mailbox *mailbox, uint64_t number, uint64_t iterator, uint32_t limit,
                               uint64_t max_bytes, RustCallStatus *status) {
    Job *job = new_job(mailbox, SCAN_ON, number, 0);
    if (!job) return ODQ_NO_MEMORY;
    job->scan.limit = limit;
    job->scan.max_bytes = max_bytes;
    return submit_with(job, mailbox->symbols.clone_dbiterator, iterator, status);
}

/* For a caller that waits for that scan no longer. Its outcome is ODQ_GIVEN_UP, unless it was done
 * before. */
EXPORT void odq_give_up_scan(Mailbox *mailbox, uint64_t number) {
    pthread_mutex_lock(&mailbox->mutex);
    for (Job *scan = mailbox->scans; scan; scan = scan->next_scan)
        if (scan->outcome.number == number) give_up(&scan->scan);
    pthread_mutex_unlock(&mailbox->mutex);
}
