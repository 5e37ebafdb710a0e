/* A disk that fails when told to: loaded with LD_PRELOAD, it counts what a process does to files below one folder.
 *
 * An operation opens or creates for writing, writes, copies, renames, links, removes, makes a folder, truncates or
 * flushes. Before the one of a given number the process is killed as a power cut would; after so many bytes the disk is
 * full: a write comes out short, as on real disks, and all that follow answer ENOSPC. Armed by environment variables
 * when the process starts, or by faults_arm() after a fork. Nothing is counted before that. System calls that a library
 * makes without libc are not seen: the rename with which safetensors 0.8 ends (its open and write are).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static size_t root_length;
static int log_descriptor = -1;
static long kill_at, full_after = -1;
static _Atomic long operations, written;

#define REAL(name, type, ...)                                                                                        \
    static type (*real)(__VA_ARGS__);                                                                                \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static ssize_t plain_write(int descriptor, const void *data, size_t size) {
    REAL("write", ssize_t, int, const void *, size_t);
    return real(descriptor, data, size);
}

/* Root, the number of the operation before which to die (0: never), the bytes that fit (-1: all), a log (or NULL). */
void faults_arm(const char *folder, long kill_before, long bytes, const char *log) {
    operations = written = 0;
    kill_at = kill_before;
    full_after = bytes;
    if (log && *log) log_descriptor = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    snprintf(root, sizeof root, "%s", folder);
    root_length = strlen(root);
}

long faults_operations(void) { return operations; }
long faults_bytes(void) { return written; }

__attribute__((constructor)) static void arm_from_environment(void) {
    const char *folder = getenv("FAULTS_ROOT"), *kill_before = getenv("FAULTS_KILL_AT");
    const char *bytes = getenv("FAULTS_FULL_AFTER");
    if (folder) faults_arm(folder, kill_before ? atol(kill_before) : 0, bytes ? atol(bytes) : -1, getenv("FAULTS_LOG"));
}

static int below(const char *path) {
    return !strncmp(path, root, root_length) && (path[root_length] == '/' || path[root_length] == 0);
}

/* The path that a descriptor or (directory, path) stands for, in `out`; whether it is below the root. */
static int named(int descriptor, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, out, PATH_MAX - 1);
    if (length < 0) return 0;
    out[length] = 0;
    return below(out);
}

static int placed(int directory, const char *path, char *out) {
    if (!path) return 0;
    if (path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
        return below(out);
    }
    char base[PATH_MAX];
    if (directory == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) return 0;
    } else {
        named(directory, base);
    }
    while (!strncmp(path, "./", 2)) path += 2;
    snprintf(out, PATH_MAX, "%.*s/%.*s", PATH_MAX / 2 - 2, base, PATH_MAX / 2 - 2, path);
    return below(out);
}

static void count(const char *what, const char *path) {
    int before = errno;
    long number = ++operations;
    if (log_descriptor >= 0) {
        char line[PATH_MAX + 64];
        int length = snprintf(line, sizeof line, "%ld %s %s\n", number, what, path + root_length);
        if (plain_write(log_descriptor, line, (size_t)length) < 0) log_descriptor = -1;
    }
    if (kill_at && number == kill_at) {
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
    errno = before;
}

/* How many of `size` bytes still fit; counts them. -1 with ENOSPC where none does. */
static ssize_t fits(size_t size) {
    long before = atomic_fetch_add(&written, (long)size);
    if (full_after < 0 || before + (long)size <= full_after) return (ssize_t)size;
    if (size && before < full_after) return full_after - before;
    errno = ENOSPC;
    return -1;
}

#define IS_ARMED (root_length != 0)
#define COUNT_DESCRIPTOR(what, descriptor)                                                                           \
    char at[PATH_MAX];                                                                                               \
    int own = IS_ARMED && named(descriptor, at);                                                                     \
    if (own) count(what, at)
#define COUNT_PATH(what, directory, path)                                                                            \
    char at[PATH_MAX];                                                                                               \
    int own = IS_ARMED && placed(directory, path, at);                                                               \
    if (own) count(what, at)

#define FOR_WRITING(flags) (((flags)&O_ACCMODE) != O_RDONLY || ((flags) & (O_CREAT | O_TRUNC)))

#define OPEN(name)                                                                                                   \
    int name(const char *path, int flags, ...) {                                                                     \
        va_list more;                                                                                                \
        va_start(more, flags);                                                                                       \
        int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, int) : 0;                                            \
        va_end(more);                                                                                                \
        if (FOR_WRITING(flags)) {                                                                                    \
            COUNT_PATH("open", AT_FDCWD, path);                                                                      \
        }                                                                                                            \
        REAL(#name, int, const char *, int, ...);                                                                    \
        return real(path, flags, mode);                                                                              \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                                                 \
    int name(int directory, const char *path, int flags, ...) {                                                      \
        va_list more;                                                                                                \
        va_start(more, flags);                                                                                       \
        int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, int) : 0;                                            \
        va_end(more);                                                                                                \
        if (FOR_WRITING(flags)) {                                                                                    \
            COUNT_PATH("open", directory, path);                                                                     \
        }                                                                                                            \
        REAL(#name, int, int, const char *, int, ...);                                                               \
        return real(directory, path, flags, mode);                                                                   \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                                                                  \
    FILE *name(const char *path, const char *mode) {                                                                 \
        if (strpbrk(mode, "wa+")) {                                                                                  \
            COUNT_PATH("open", AT_FDCWD, path);                                                                      \
        }                                                                                                            \
        REAL(#name, FILE *, const char *, const char *);                                                             \
        return real(path, mode);                                                                                     \
    }
FOPEN(fopen)
FOPEN(fopen64)

ssize_t write(int descriptor, const void *data, size_t size) {
    COUNT_DESCRIPTOR("write", descriptor);
    ssize_t room = own ? fits(size) : (ssize_t)size;
    return room < 0 ? -1 : plain_write(descriptor, data, (size_t)room);
}

#define PWRITE(name, offset_type)                                                                                    \
    ssize_t name(int descriptor, const void *data, size_t size, offset_type offset) {                                \
        COUNT_DESCRIPTOR("write", descriptor);                                                                       \
        ssize_t room = own ? fits(size) : (ssize_t)size;                                                             \
        REAL(#name, ssize_t, int, const void *, size_t, offset_type);                                                \
        return room < 0 ? -1 : real(descriptor, data, (size_t)room, offset);                                         \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

/* Where the disk is nearly full the first part that fits goes out alone: a short write. */
ssize_t writev(int descriptor, const struct iovec *parts, int number) {
    COUNT_DESCRIPTOR("write", descriptor);
    REAL("writev", ssize_t, int, const struct iovec *, int);
    if (!own) return real(descriptor, parts, number);
    size_t size = 0;
    for (int i = 0; i < number; i++) size += parts[i].iov_len;
    ssize_t room = fits(size);
    if (room < 0) return -1;
    if ((size_t)room == size) return real(descriptor, parts, number);
    for (int i = 0; i < number; i++)
        if (parts[i].iov_len)
            return plain_write(descriptor, parts[i].iov_base,
                               parts[i].iov_len < (size_t)room ? parts[i].iov_len : (size_t)room);
    return 0;
}

#define COPY(name, parameters, types, target, size, call)                                                            \
    ssize_t name parameters {                                                                                        \
        COUNT_DESCRIPTOR("copy", target);                                                                            \
        long left = own && full_after >= 0 ? full_after - written : LONG_MAX;                                        \
        if (left <= 0) return errno = ENOSPC, -1;                                                                    \
        if ((unsigned long)left < size) size = (size_t)left;                                                         \
        static ssize_t(*real) types;                                                                                 \
        if (!real) real = (ssize_t(*) types)dlsym(RTLD_NEXT, #name);                                                 \
        ssize_t done = real call;                                                                                    \
        if (own && done > 0) written += done;                                                                        \
        return done;                                                                                                 \
    }
COPY(sendfile, (int to, int from, off_t *place, size_t size), (int, int, off_t *, size_t), to, size,
     (to, from, place, size))
COPY(sendfile64, (int to, int from, off64_t *place, size_t size), (int, int, off64_t *, size_t), to, size,
     (to, from, place, size))
COPY(copy_file_range, (int from, off64_t *a, int to, off64_t *b, size_t size, unsigned int flags),
     (int, off64_t *, int, off64_t *, size_t, unsigned int), to, size, (from, a, to, b, size, flags))

int rename(const char *from, const char *to) {
    COUNT_PATH("rename to", AT_FDCWD, to);
    REAL("rename", int, const char *, const char *);
    return real(from, to);
}
int renameat(int a, const char *from, int b, const char *to) {
    COUNT_PATH("rename to", b, to);
    REAL("renameat", int, int, const char *, int, const char *);
    return real(a, from, b, to);
}
int renameat2(int a, const char *from, int b, const char *to, unsigned int flags) {
    COUNT_PATH("rename to", b, to);
    REAL("renameat2", int, int, const char *, int, const char *, unsigned int);
    return real(a, from, b, to, flags);
}
int link(const char *from, const char *to) {
    COUNT_PATH("link", AT_FDCWD, to);
    REAL("link", int, const char *, const char *);
    return real(from, to);
}
int symlink(const char *from, const char *to) {
    COUNT_PATH("symlink", AT_FDCWD, to);
    REAL("symlink", int, const char *, const char *);
    return real(from, to);
}
int unlink(const char *path) {
    COUNT_PATH("unlink", AT_FDCWD, path);
    REAL("unlink", int, const char *);
    return real(path);
}
int unlinkat(int directory, const char *path, int flags) {
    COUNT_PATH("unlink", directory, path);
    REAL("unlinkat", int, int, const char *, int);
    return real(directory, path, flags);
}
int mkdir(const char *path, mode_t mode) {
    COUNT_PATH("mkdir", AT_FDCWD, path);
    REAL("mkdir", int, const char *, mode_t);
    return real(path, mode);
}
int mkdirat(int directory, const char *path, mode_t mode) {
    COUNT_PATH("mkdir", directory, path);
    REAL("mkdirat", int, int, const char *, mode_t);
    return real(directory, path, mode);
}
int rmdir(const char *path) {
    COUNT_PATH("rmdir", AT_FDCWD, path);
    REAL("rmdir", int, const char *);
    return real(path);
}

#define TRUNCATE(name, offset_type)                                                                                  \
    int name(int descriptor, offset_type size) {                                                                     \
        COUNT_DESCRIPTOR("truncate", descriptor);                                                                    \
        struct stat now;                                                                                             \
        if (own && full_after >= 0 && !fstat(descriptor, &now) && size > now.st_size && written > full_after)        \
            return errno = ENOSPC, -1;                                                                               \
        REAL(#name, int, int, offset_type);                                                                          \
        return real(descriptor, size);                                                                               \
    }
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)

int fsync(int descriptor) {
    COUNT_DESCRIPTOR("fsync", descriptor);
    REAL("fsync", int, int);
    return real(descriptor);
}
int fdatasync(int descriptor) {
    COUNT_DESCRIPTOR("fsync", descriptor);
    REAL("fdatasync", int, int);
    return real(descriptor);
}
