/* Appends records to journals. */
#include "helper.h"

#include <errno.h>
#include <sys/stat.h>

/* The number of the error, or 0. */
static int write_at(int descriptor, const uint8_t *bytes, size_t size, uint64_t offset) {
    while (size) {
        const ssize_t written = pwrite(descriptor, bytes, size, (off_t)offset);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return written ? errno : EIO;
        bytes += written;
        offset += (uint64_t)written;
        size -= (size_t)written;
    }
    return 0;
}

int append_record(const Append *to, const uint8_t *record, size_t size, int32_t *error_number) {
    struct stat file;
    *error_number = write_at(to->descriptor, record, size, to->offset);
    if (*error_number) return ODQ_NOT_WRITTEN;
    if (to->flags & JOB_SYNC) *error_number = synced(fdatasync, to->descriptor);
    if (*error_number) return ODQ_NOT_SYNCED;
    if (!access(to->next, F_OK)) return ODQ_FENCED;
    if (errno != ENOENT || fstat(to->descriptor, &file)) {
        *error_number = errno;
        return ODQ_NOT_SYNCED;
    }
    return file.st_nlink ? ODQ_OK : ODQ_FENCED;
}
