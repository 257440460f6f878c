/* The C helper: writes packed batches of rows to SlateDB through the C symbols of its Python binding,
 * makes them durable, appends them to journals, and reads the rows of scans. It joins columns to rows,
 * and takes the rows of a log apart into columns.
 *
 * There are two ways to write. `odq_write` does everything in one call that blocks, so the calling
 * thread needs the GIL only before and after it. `odq_submit_write` and the other `odq_submit_*`
 * hand a job to a thread of this library and return; when the job is done, it is put into a mailbox,
 * whose descriptor wakes an event loop. No Python thread is needed then, and none has to wait for the
 * GIL while the event loop is busy.
 *
 * It is a plain shared library without Python headers: ctypes loads it, and releases the GIL for the
 * length of each call. It links against nothing of SlateDB; the caller hands over the addresses. Its
 * only state are the pools of threads. Any number of threads may call it at once.
 *
 * The layout of rows is stated in rows/rows.py, the meaning of the symbols in native/binding.py. Where
 * a signature, a structure or a number changes, ODQ_ABI must be raised here and in native/abi.py,
 * which has the same structures and numbers by the same names. */
#ifndef ODQ_HELPER_H
#define ODQ_HELPER_H

#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#ifdef __APPLE__
#define fdatasync fsync
#endif

#define ODQ_ABI 11
#define EXPORT __attribute__((visibility("default")))

/* --- what Python mirrors by name ---------------------------------------------------------------- */

/* Lists of names with their numbers, for an enum and for the text that a test compares. */
#define ODQ_MEMBER(name, number) name = number,
#define ODQ_AS_TEXT(name, number) #name "=" #number "\n"

/* Results of the exported functions, and of jobs. */
#define ODQ_RESULTS(X) \
    X(ODQ_OK, 0) \
    X(ODQ_FAILED, 1) \
    X(ODQ_MALFORMED, 2) \
    X(ODQ_NOT_SYNCED, 3) \
    X(ODQ_NO_WAL, 4) \
    X(ODQ_NO_MEMORY, 5) \
    X(ODQ_NO_THREAD, 6) \
    X(ODQ_GIVEN_UP, 7) \
    X(ODQ_FENCED, 8) \
    X(ODQ_NOT_WRITTEN, 9)
enum { ODQ_RESULTS(ODQ_MEMBER) };

/* What a job does besides: flush what it has written, sync the record that it has appended, read
 * with the handle of a reader instead of a database. */
#define ODQ_JOB_FLAGS(X) \
    X(JOB_FLUSH, 1) \
    X(JOB_SYNC, 2) \
    X(JOB_OF_READER, 4)
enum { ODQ_JOB_FLAGS(ODQ_MEMBER) };

/* The first byte of a packed row. */
#define ODQ_OPS(X) \
    X(OP_PUT, 1) \
    X(OP_PUT_TTL, 2) \
    X(OP_DELETE, 3)
enum { ODQ_OPS(ODQ_MEMBER) };

#define ODQ_LIMITS(X) \
    X(MOST_COLUMNS, 32)
enum { ODQ_LIMITS(ODQ_MEMBER) };

enum { HEADER_BYTES = 16 }; /* of a packed row */

/* --- the binding: uniffi 0.31, contract version 30 ---------------------------------------------- */

typedef struct { uint64_t capacity, len; uint8_t *data; } RustBuffer;
typedef struct { int8_t code; RustBuffer error_buf; } RustCallStatus;
typedef void (*Continuation)(uint64_t data, int8_t poll_code);
enum { CALL_SUCCESS = 0, CALL_CANCELLED = 3, POLL_READY = 0 };
enum { LENGTH_BYTES = 4 }; /* of a byte string, and of a sequence */

typedef struct {
    RustBuffer (*rustbuffer_alloc)(uint64_t size, RustCallStatus *);
    uint64_t (*clone_db)(uint64_t, RustCallStatus *);
    uint64_t (*writebatch_new)(RustCallStatus *);
    uint64_t (*clone_writebatch)(uint64_t, RustCallStatus *);
    void (*free_writebatch)(uint64_t, RustCallStatus *);
    void (*free_writehandle)(uint64_t, RustCallStatus *);
    void (*writebatch_put)(uint64_t, RustBuffer, RustBuffer, RustCallStatus *);
    void (*writebatch_put_with_options)(uint64_t, RustBuffer, RustBuffer, RustBuffer,
                                        RustCallStatus *);
    void (*writebatch_delete)(uint64_t, RustBuffer, RustCallStatus *);
    uint64_t (*db_write)(uint64_t db, uint64_t batch);
    uint64_t (*db_flush)(uint64_t db);
    void (*poll_u64)(uint64_t future, Continuation, uint64_t data);
    uint64_t (*complete_u64)(uint64_t future, RustCallStatus *);
    void (*free_u64)(uint64_t future);
    void (*poll_void)(uint64_t future, Continuation, uint64_t data);
    void (*complete_void)(uint64_t future, RustCallStatus *);
    void (*free_void)(uint64_t future);
    void (*rustbuffer_free)(RustBuffer, RustCallStatus *);
    void (*free_db)(uint64_t, RustCallStatus *);
    uint64_t (*db_scan)(uint64_t db, RustBuffer range, RustBuffer options);
    uint64_t (*clone_dbreader)(uint64_t, RustCallStatus *);
    void (*free_dbreader)(uint64_t, RustCallStatus *);
    uint64_t (*dbreader_scan)(uint64_t reader, RustBuffer range, RustBuffer options);
    uint64_t (*clone_dbiterator)(uint64_t, RustCallStatus *);
    void (*free_dbiterator)(uint64_t, RustCallStatus *);
    uint64_t (*dbiterator_next_batch)(uint64_t iterator, uint32_t rows);
    void (*poll_rust_buffer)(uint64_t future, Continuation, uint64_t data);
    RustBuffer (*complete_rust_buffer)(uint64_t future, RustCallStatus *);
    void (*free_rust_buffer)(uint64_t future);
    void (*cancel_u64)(uint64_t future);
    void (*cancel_rust_buffer)(uint64_t future);
} Symbols;

/* --- what is shared with Python ----------------------------------------------------------------- */

/* The WAL files to sync after a flush: `folder`/`next`.sst and those after it, then the folder
 * itself, which `descriptor` is open on. `next` is moved on; files/durable.py says why that is all. */
typedef struct { const char *folder; int32_t descriptor, error_number; uint64_t next; } WalSync;

/* Where a record goes: into the file that `descriptor` is open on, at `offset`. `next` is the file
 * that the next owner makes first. journal/journal.py says why no other file has to be checked. */
typedef struct { const char *next; int32_t descriptor, flags; uint64_t offset; } Append;

/* The outcome of a job. On ODQ_FAILED `status` holds the error; `rows` is what a scan has found, and
 * `has_more` whether there may be more behind it. If a scan of a range has stopped for their bytes,
 * `iterator` goes on with it; else that is 0. The receiver frees buffers and iterator. */
typedef struct { uint64_t number, wal_next; int32_t result, error_number; RustCallStatus status;
                 RustBuffer rows; uint64_t iterator; int32_t has_more; } Outcome;

/* --- shared by the files of the helper ---------------------------------------------------------- */

static inline uint64_t read_le(const uint8_t *at, unsigned bytes) {
    uint64_t value = 0;
    while (bytes--) value = value << 8 | at[bytes];
    return value;
}

static inline uint64_t read_be(const uint8_t *at, unsigned bytes) {
    uint64_t value = 0;
    while (bytes--) value = value << 8 | *at++;
    return value;
}

static inline void write_be(uint8_t *at, uint64_t value, unsigned bytes) {
    while (bytes--) { at[bytes] = (uint8_t)value; value >>= 8; }
}

/* future.c: blocks until the future is ready. */
void drive(void (*poll)(uint64_t, Continuation, uint64_t), uint64_t future);

/* sync.c: `synced` returns the number of the error, or 0; interruptions are none. */
int synced(int (*sync)(int), int descriptor);
int sync_wal(WalSync *wal);

/* write.c: `odq_write`, for the other files of the helper. */
int write_durably(const Symbols *s, uint64_t db, const uint8_t *rows, uint64_t size, int32_t flags,
                  WalSync *wal, RustCallStatus *status);

/* journal.c: only after ODQ_OK may the record be acknowledged: an owner that takes over later finds
 * it. */
int append_record(const Append *to, const uint8_t *record, size_t size, int32_t *error_number);

/* A scan that may be given up while a thread drives it. The mutex, which is that of its mailbox,
 * guards `given_up`, the future that is driven, if there is one, and what ends that future early. */
typedef struct {
    pthread_mutex_t *mutex;
    int given_up;
    uint64_t future;
    void (*cancel)(uint64_t future);
    uint32_t limit;
    uint64_t max_bytes; /* of its rows */
} Scan;

/* scan.c: `give_up` is called with the mutex. The others return the result of the job, and put all
 * else that there is into its outcome. */
void give_up(Scan *scan);
int first_rows(const Symbols *s, Scan *scan, uint64_t handle, int32_t flags, const uint8_t *bytes,
               uint64_t range_size, uint64_t size, Outcome *out);
int next_rows(const Symbols *s, Scan *scan, uint64_t iterator, Outcome *out);

#endif
