/* Stands in for pyxis: srun's options, checked and applied as pyxis documents them, on an image that is a folder.
   The task enters a mount namespace with an overlay of the image and the mounts, then changes its root. What enroot
   does (import, user namespace, hooks for GPUs) is missing. Variables of the image are lines of MARK. */
#define _GNU_SOURCE
#include <sched.h>
#include <slurm/spank.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

SPANK_PLUGIN(pyxis_stand_in, 1)

#define MARK "/etc/hpc-train-test-image"
#define FAIL(what) do { slurm_error("pyxis stand-in: %s: %m", what); return -1; } while (0)

enum { IMAGE, MOUNTS, WORKDIR, ENV, NUM };
static char *values[NUM];

static int set(int which, const char *value, int remote) {
    (void)remote;
    if (which < NUM) values[which] = strdup(value);
    return 0;
}

#define OPTION(name, argument, which) { name, argument, "[pyxis] stand-in of the tests", argument != NULL, which, set }
static struct spank_option options[] = {
    OPTION("container-image", "IMAGE", IMAGE), OPTION("container-mounts", "SRC:DST[:FLAGS],...", MOUNTS),
    OPTION("container-workdir", "PATH", WORKDIR), OPTION("container-env", "NAME,...", ENV),
    OPTION("no-container-entrypoint", NULL, NUM), SPANK_OPTIONS_TABLE_END,
};

int slurm_spank_init(spank_t sp, int argc, char **argv) {
    (void)argc; (void)argv;
    for (struct spank_option *option = options; option->name; option++)
        if (spank_option_register(sp, option) != ESPANK_SUCCESS) return -1;
    return 0;
}

/* mkdir -p */
static void make_folders(char *path) {
    for (char *slash = path + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = 0; mkdir(path, 0755); *slash = '/';
    }
    mkdir(path, 0755);
}

static int mount_all(const char *root, char *list) {
    for (char *rest = list, *entry; (entry = strsep(&rest, ","));) {
        char *source = strsep(&entry, ":"), *target = strsep(&entry, ":"), *flags = entry, path[8192];
        if (!target) target = source;
        snprintf(path, sizeof path, "%s%s", root, target);
        make_folders(path);
        if (mount(source, path, NULL, MS_BIND | MS_REC, NULL)) FAIL(source);
        if (flags && !strcmp(flags, "ro") && mount(NULL, path, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY, NULL)) FAIL(path);
    }
    return 0;
}

static int is_listed(const char *name) {
    size_t length = strlen(name);
    for (const char *at = values[ENV] ? values[ENV] : ""; *at; at += *at == ',') {
        if (!strncmp(at, name, length) && (at[length] == ',' || !at[length])) return 1;
        at += strcspn(at, ",");
    }
    return 0;
}

int slurm_spank_task_init_privileged(spank_t sp, int argc, char **argv) {
    (void)argc; (void)argv;
    char root[] = "/tmp/pyxis-stand-in-XXXXXX", text[4096], line[1024];
    if (!values[IMAGE]) return 0;
    if (!mkdtemp(root) || unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) FAIL("namespace");
    /* Layers in memory, which end with the namespace. */
    if (mount("tmpfs", root, "tmpfs", 0, NULL)) FAIL(root);
    for (const char **name = (const char *[]){ "upper", "work", "all", NULL }; *name; name++) {
        snprintf(text, sizeof text, "%s/%s", root, *name);
        mkdir(text, 0755);
    }
    snprintf(text, sizeof text, "lowerdir=%s,upperdir=%s/upper,workdir=%s/work", values[IMAGE], root, root);
    snprintf(line, sizeof line, "%s/all", root);
    if (mount("overlay", line, "overlay", 0, text)) FAIL(values[IMAGE]);
    char shared[] = "/dev:/dev,/proc:/proc,/sys:/sys";
    if (mount_all(line, shared) || (values[MOUNTS] && mount_all(line, values[MOUNTS]))) return -1;
    if (chroot(line) || chdir(values[WORKDIR] ? values[WORKDIR] : "/")) FAIL(line);
    FILE *file = fopen(MARK, "r");
    while (file && fgets(line, sizeof line, file)) {
        char *value = line, *name = strsep(&value, "=");
        value[strcspn(value, "\n")] = 0;
        if (!is_listed(name)) spank_setenv(sp, name, value, 1);
    }
    if (file) fclose(file);
    return 0;
}
