/* LD_PRELOAD for ranks: fails, or kills the process at, the n-th touch of files under a part of a path.
 *
 * FAULTS_UNDER    parts of the paths that are touched, any of them, with ":" between: "/checkpoints/"
 * FAULTS_FOLDER   where rank r finds its order as "rank-<r>": one line "NUMBER ERRNO TIMES CLASSES", written whole
 *                 by rename. ERRNO 0 kills. CLASSES is a sum of the values below.
 * Counting begins with the first touch that finds the order. Once it strikes it renames the order to
 * "rank-<r>.struck", so that no later attempt is hit. Anything that is no rank is left alone.
 *
 * FAULTS_CLOCK_S  by how many seconds the ranks' clocks are wrong, one number per rank: "7200,-7200"
 *
 * A process reads these variables, and RANK, when it starts and when it sets any variable: a rank that is forked
 * from a warm process sets them itself.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { WRITE = 1, SYNC = 2, CREATE = 4, RENAME = 8, REMOVE = 16 };

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char *under;
static char order[PATH_MAX], struck[PATH_MAX + 8];
static int error_number, classes;
static long left, times = -1; /* times < 0: no order has been read */
static long clock_is_wrong_by;

static void set_clock(int rank)
{
    const char *wrong = getenv("FAULTS_CLOCK_S");
    while (wrong && rank-- > 0 && (wrong = strchr(wrong, ',')))
        wrong++;
    clock_is_wrong_by = wrong ? atol(wrong) : 0;
}

__attribute__((constructor)) static void start(void)
{
    const char *folder = getenv("FAULTS_FOLDER"), *rank = getenv("RANK");
    /* On Slurm the batch script and srun have SLURM_PROCID as well; rank.py alone sets the other. */
    if (!rank && getenv("HPC_TRAIN_RANK_START"))
        rank = getenv("SLURM_PROCID");
    if (!folder || !rank || !getenv("FAULTS_UNDER"))
        return;
    set_clock(atoi(rank));
    snprintf(order, sizeof order, "%s/rank-%s", folder, rank);
    snprintf(struck, sizeof struck, "%s.struck", order);
    under = getenv("FAULTS_UNDER");
}

static int is_under(const char *path)
{
    char part[PATH_MAX];
    const char *next = under;
    while (*next) {
        size_t size = strcspn(next, ":");
        snprintf(part, sizeof part, "%.*s", (int)size, next);
        if (size && strstr(path, part))
            return 1;
        next += size + (next[size] == ':');
    }
    return 0;
}

int setenv(const char *name, const char *value, int replaces)
{
    int error = NEXT(setenv)(name, value, replaces);
    start();
    return error;
}

/* By system calls: what this file does is not counted. */
static int has_order(void)
{
    char text[128];
    int file;
    long size;
    if (times >= 0)
        return 1;
    file = (int)syscall(SYS_openat, AT_FDCWD, order, O_RDONLY);
    if (file < 0)
        return 0;
    size = syscall(SYS_read, file, text, sizeof text - 1);
    syscall(SYS_close, file);
    text[size > 0 ? size : 0] = 0;
    if (sscanf(text, "%ld %d %ld %d", &left, &error_number, &times, &classes) != 4)
        abort();
    return 1;
}

/* Return the error of this touch, 0 for none. */
static int touch(int kind, const char *path)
{
    int error = 0;
    if (!under || !is_under(path))
        return 0;
    pthread_mutex_lock(&lock);
    if (has_order() && (classes & kind) && times > 0 && --left <= 0) {
        syscall(SYS_renameat2, AT_FDCWD, order, AT_FDCWD, struck, 0);
        if (error_number == 0)
            kill(getpid(), SIGKILL);
        times--;
        error = error_number;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

static int touch_at(int kind, int folder, const char *name)
{
    char link[64], path[2 * PATH_MAX];
    ssize_t size;
    if (!under)
        return 0;
    if (folder == AT_FDCWD || name[0] == '/')
        return touch(kind, name);
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    size = readlink(link, path, PATH_MAX);
    if (size < 0)
        return 0;
    snprintf(path + size, PATH_MAX, "/%s", name);
    return touch(kind, path);
}

static int touch_file(int kind, int file)
{
    char link[64], path[PATH_MAX];
    ssize_t size;
    if (!under)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    size = readlink(link, path, sizeof path - 1);
    if (size < 0)
        return 0;
    path[size] = 0;
    return touch(kind, path);
}

#define FAIL_IF(call)              \
    do {                           \
        int error_ = (call);       \
        if (error_) {              \
            errno = error_;        \
            return -1;             \
        }                          \
    } while (0)

#define WRITES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT))
#define MODE(flags)                                                  \
    mode_t mode = 0;                                                 \
    if (((flags) & O_CREAT) || ((flags) & O_TMPFILE) == O_TMPFILE) { \
        va_list rest;                                                \
        va_start(rest, flags);                                       \
        mode = va_arg(rest, mode_t);                                 \
        va_end(rest);                                                \
    }

int open(const char *path, int flags, ...)
{
    MODE(flags)
    FAIL_IF(WRITES(flags) ? touch_at(CREATE, AT_FDCWD, path) : 0);
    return NEXT(open)(path, flags, mode);
}

int open64(const char *path, int flags, ...)
{
    MODE(flags)
    FAIL_IF(WRITES(flags) ? touch_at(CREATE, AT_FDCWD, path) : 0);
    return NEXT(open64)(path, flags, mode);
}

int openat(int folder, const char *path, int flags, ...)
{
    MODE(flags)
    FAIL_IF(WRITES(flags) ? touch_at(CREATE, folder, path) : 0);
    return NEXT(openat)(folder, path, flags, mode);
}

int openat64(int folder, const char *path, int flags, ...)
{
    MODE(flags)
    FAIL_IF(WRITES(flags) ? touch_at(CREATE, folder, path) : 0);
    return NEXT(openat64)(folder, path, flags, mode);
}

int mkdir(const char *path, mode_t mode)
{
    FAIL_IF(touch_at(CREATE, AT_FDCWD, path));
    return NEXT(mkdir)(path, mode);
}

ssize_t write(int file, const void *data, size_t size)
{
    FAIL_IF(touch_file(WRITE, file));
    return NEXT(write)(file, data, size);
}

ssize_t writev(int file, const struct iovec *parts, int count)
{
    FAIL_IF(touch_file(WRITE, file));
    return NEXT(writev)(file, parts, count);
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t offset)
{
    FAIL_IF(touch_file(WRITE, file));
    return NEXT(pwrite64)(file, data, size, offset);
}

ssize_t pwrite(int file, const void *data, size_t size, off_t offset)
{
    FAIL_IF(touch_file(WRITE, file));
    return NEXT(pwrite)(file, data, size, offset);
}

ssize_t pwritev(int file, const struct iovec *parts, int count, off_t offset)
{
    FAIL_IF(touch_file(WRITE, file));
    return NEXT(pwritev)(file, parts, count, offset);
}

int ftruncate64(int file, off64_t size)
{
    FAIL_IF(touch_file(WRITE, file));
    return NEXT(ftruncate64)(file, size);
}

int posix_fallocate64(int file, off64_t offset, off64_t size)
{
    int error = touch_file(WRITE, file);
    return error ? error : NEXT(posix_fallocate64)(file, offset, size);
}

int posix_fallocate(int file, off_t offset, off_t size)
{
    int error = touch_file(WRITE, file);
    return error ? error : NEXT(posix_fallocate)(file, offset, size);
}

int fsync(int file)
{
    FAIL_IF(touch_file(SYNC, file));
    return NEXT(fsync)(file);
}

int fdatasync(int file)
{
    FAIL_IF(touch_file(SYNC, file));
    return NEXT(fdatasync)(file);
}

int rename(const char *from, const char *to)
{
    FAIL_IF(touch_at(RENAME, AT_FDCWD, from));
    return NEXT(rename)(from, to);
}

int renameat(int from_folder, const char *from, int to_folder, const char *to)
{
    FAIL_IF(touch_at(RENAME, from_folder, from));
    return NEXT(renameat)(from_folder, from, to_folder, to);
}

int unlink(const char *path)
{
    FAIL_IF(touch_at(REMOVE, AT_FDCWD, path));
    return NEXT(unlink)(path);
}

int unlinkat(int folder, const char *path, int flags)
{
    FAIL_IF(touch_at(REMOVE, folder, path));
    return NEXT(unlinkat)(folder, path, flags);
}

int rmdir(const char *path)
{
    FAIL_IF(touch_at(REMOVE, AT_FDCWD, path));
    return NEXT(rmdir)(path);
}

int clock_gettime(clockid_t clock, struct timespec *time)
{
    int error = (int)syscall(SYS_clock_gettime, clock, time);
    if (!error && clock == CLOCK_REALTIME)
        time->tv_sec += clock_is_wrong_by;
    return error;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone)
{
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now))
        return -1;
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *to)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to)
        *to = now.tv_sec;
    return now.tv_sec;
}
