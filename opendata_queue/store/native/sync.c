/* Syncs files, so that they survive a power cut. */
#include "helper.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>

int synced(int (*sync)(int), int descriptor) {
    int result;
    do result = sync(descriptor); while (result && errno == EINTR);
    return result ? errno : 0;
}

static int sync_file(const char *path) {
    int descriptor;
    do descriptor = open(path, O_RDONLY | O_CLOEXEC); while (descriptor < 0 && errno == EINTR);
    if (descriptor < 0) return errno;
    const int error = synced(fdatasync, descriptor);
    close(descriptor);
    return error;
}

int sync_wal(WalSync *wal) {
    char path[4096];
    const uint64_t first = wal->next;
    for (;;) {
        const int size = snprintf(path, sizeof path, "%s/%020" PRIu64 ".sst", wal->folder, wal->next);
        const int fits = size >= 0 && size < (int)sizeof path;
        wal->error_number = fits ? sync_file(path) : ENAMETOOLONG;
        if (wal->error_number) break;
        wal->next++;
    }
    if (wal->error_number != ENOENT) return ODQ_NOT_SYNCED;
    if (wal->next == first) return ODQ_NO_WAL;
    wal->error_number = synced(fsync, wal->descriptor);
    return wal->error_number ? ODQ_NOT_SYNCED : ODQ_OK;
}
