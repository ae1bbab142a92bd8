/* The hollow driver with a memory: it writes down every launch, copy, fill, tensor map, capture, replay and wait, one line
   each, and ends the process when one of them could not be right. Variables, besides those of driver.c:

     HOLLOW_LOG=FILE        what is written
     HOLLOW_ARGUMENTS=FILE  sizes of each kernel's arguments, see kernels-cuda/tests/kernel_arguments.txt
     HOLLOW_SEED=1          other seeds let other kernels be the fastest

   Addresses are handed out once and never again, so one that is no longer owned is noticed: in launches, copies and every
   node of a graph that is replayed. In the log an address is a buffer and an offset: `b12+64` on the device, `h3` in
   page-locked memory of the host. Work happens as late as it may, when somebody waits for it: page-locked memory that a
   launch or copy reads has to be unchanged by then, and drawn tokens appear in the host's memory only then. The time between
   two events follows from the kernels and grids launched between them, in any order. */

#define RECORDS
#include "driver.c"

#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
static FILE *log_file;

static void enter(void) {
    pthread_mutex_lock(&one_at_a_time);
    if (log_file) return;
    const char *path = getenv("HOLLOW_LOG");
    log_file = fopen(path ? path : "/dev/null", "w");
    if (!log_file) abort();
    setvbuf(log_file, NULL, _IOFBF, 1 << 20);
}

static int leave(int code) {
    pthread_mutex_unlock(&one_at_a_time);
    return code;
}

__attribute__((destructor)) static void flush(void) {
    if (log_file) fflush(log_file);
}

static void say(const char *format, ...) {
    va_list list;
    va_start(list, format);
    vfprintf(log_file, format, list);
    va_end(list);
    fputc('\n', log_file);
}

/* What no GPU would survive, or what it would compute nonsense from. */
__attribute__((noreturn)) static void wrong(const char *format, ...) {
    va_list list;
    char text[2048];
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    fprintf(stderr, "hollow driver: %s\n", text);
    say("wrong %s", text);
    fflush(log_file);
    abort();
}

static void *more(void *list, size_t count, size_t *room, size_t each) {
    if (count < *room) return list;
    *room = *room ? 2 * *room : 64;
    list = realloc(list, *room * each);
    if (!list) abort();
    return list;
}

static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static uint64_t hash_of(const void *data, size_t bytes) {
    const unsigned char *at = data;
    uint64_t hash = 0x9e3779b97f4a7c15u + bytes, word;
    for (; bytes >= 8; bytes -= 8, at += 8) {
        memcpy(&word, at, 8);
        hash = (hash ^ word) * 0xff51afd7ed558ccdu;
        hash ^= hash >> 32;
    }
    for (; bytes; bytes--, at++) hash = (hash ^ *at) * 0xff51afd7ed558ccdu;
    return mix(hash);
}

/* ---- Memory ---- */

struct range {
    uint64_t at;
    size_t bytes;
    int live;
};
static struct range *device, *host;
static size_t devices, device_room, hosts, host_room, taken;

/* No two halves of a struct's words look like an address up here. Ranges lie apart, so that one past an end is nowhere. */
#define DEVICE_BASE 0x00d1000000000000u
#define APART (2u << 20)
static uint64_t next_address = DEVICE_BASE;

EXPORT int cuMemGetInfo_v2(size_t *free, size_t *total) {
    enter();
    size_t all = (size_t)number("HOLLOW_FREE_MIB", 80000) << 20;
    *free = all > taken ? all - taken : 0;
    *total = 80ul << 30;
    return leave(0);
}

static void not_while_capturing(const char *what);

EXPORT int cuMemAlloc_v2(uint64_t *pointer, size_t bytes) {
    enter();
    not_while_capturing("cuMemAlloc");
    int code = outcome("cuMemAlloc_v2");
    if (!code && taken + bytes > (size_t)number("HOLLOW_FREE_MIB", 80000) << 20) code = 2;
    if (code) return leave(code);
    device = more(device, devices, &device_room, sizeof *device);
    device[devices] = (struct range){next_address, bytes, 1};
    *pointer = next_address;
    next_address += (bytes + 2 * APART - 1) / APART * APART;
    taken += bytes;
    say("alloc b%zu %zu", devices++, bytes);
    return leave(0);
}

static size_t device_range(uint64_t address) {
    size_t low = 0, high = devices;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (device[middle].at <= address) low = middle; else high = middle;
    }
    return low;
}

EXPORT int cuMemFree_v2(uint64_t address) {
    enter();
    not_while_capturing("cuMemFree");
    size_t index = device_range(address);
    if (!devices || device[index].at != address || !device[index].live)
        wrong("cuMemFree of %#lx, where no buffer begins", (unsigned long)address);
    device[index].live = 0;
    taken -= device[index].bytes;
    say("free b%zu", index);
    return leave(0);
}

EXPORT int cuMemHostAlloc(void **pointer, size_t bytes) {
    enter();
    *pointer = calloc(1, bytes + 64);
    host = more(host, hosts, &host_room, sizeof *host);
    host[hosts] = (struct range){(uint64_t)*pointer, bytes, 1};
    say("alloc h%zu %zu", hosts++, bytes);
    return leave(*pointer ? 0 : 2);
}

static struct range *host_range(uint64_t address) {
    for (size_t i = hosts; i-- > 0;)
        if (host[i].live && address >= host[i].at && address - host[i].at < host[i].bytes) return &host[i];
    return NULL;
}

EXPORT int cuMemFreeHost(void *pointer) {
    enter();
    struct range *range = host_range((uint64_t)pointer);
    if (range) range->live = 0;
    free(pointer);
    return leave(0);
}

/* `text` gets the buffer and offset of a device address; what is there has to be owned, all `bytes` of it. */
static size_t device_place(uint64_t address, size_t bytes, const char *what, char *text) {
    size_t index = device_range(address);
    uint64_t offset = devices ? address - device[index].at : 0;
    if (!devices || address < DEVICE_BASE || offset + bytes > device[index].bytes) {
        if (devices && address >= DEVICE_BASE)
            wrong("%s: an address outside of every buffer: %zu bytes at %lu behind the beginning of b%zu, which has %zu", what,
                  bytes, (unsigned long)offset, index, device[index].bytes);
        wrong("%s: %#lx is no address of the device", what, (unsigned long)address);
    }
    if (!device[index].live) wrong("%s: an address in b%zu, %zu bytes, which was given back", what, index, device[index].bytes);
    if (text) text += sprintf(text, "b%zu", index);
    if (text && offset) sprintf(text, "+%lu", (unsigned long)offset);
    return index;
}

/* ---- Work that is launched and not waited for ---- */

static struct graph *capturing;

struct work {
    const char *what;
    uint64_t number;
    /* Memory of the host that it reads, and its contents at the launch. */
    const void *from;
    size_t bytes;
    uint64_t sum;
    /* Memory of the host where it leaves tokens. */
    uint32_t *tokens;
    uint32_t count;
};
static struct work *queue;
static size_t queued, queue_room;
static uint64_t launched, finished, drawn;

static void later(struct work work) {
    if (capturing) return;
    queue = more(queue, queued, &queue_room, sizeof *queue);
    work.number = ++launched;
    work.sum = work.from ? hash_of(work.from, work.bytes) : 0;
    queue[queued++] = work;
}

/* Tokens of a small vocabulary: some of them end requests. */
#define TOKENS 64

static void finish(uint64_t until) {
    size_t done = 0;
    for (; done < queued && queue[done].number <= until; done++) {
        struct work *work = &queue[done];
        if (work->from && hash_of(work->from, work->bytes) != work->sum)
            wrong("%s: the host has changed %zu bytes of page-locked memory that it reads before it was waited for",
                  work->what, work->bytes);
        drawn += work->tokens != NULL;
        for (uint32_t row = 0; row < work->count; row++)
            work->tokens[row] = mix(drawn * 0x10001 + row) % TOKENS;
    }
    memmove(queue, queue + done, (queued - done) * sizeof *queue);
    queued -= done;
    if (until > finished) finished = until;
}

/* ---- Graphs ---- */

struct graph {
    size_t number, nodes, counted;
    /* Sum of what its launches count for between events. */
    uint64_t worth;
    size_t *buffers, buffer_count, buffer_room;
    int live;
};
static size_t graphs;
static uint64_t worth;

static void not_while_capturing(const char *what) {
    if (capturing) wrong("%s while a graph is captured", what);
}

/* A launch or copy: a node where a graph is captured. */
static void node(uint64_t value, const size_t *buffers, size_t count) {
    if (!capturing) {
        worth += value;
        return;
    }
    if (capturing->counted < capturing->nodes)
        wrong("node %zu of a captured graph was not counted before the next launch (note_launch), so it has no op",
              capturing->nodes);
    capturing->nodes++;
    capturing->worth += value;
    for (size_t i = 0; i < count; i++) {
        capturing->buffers =
            more(capturing->buffers, capturing->buffer_count, &capturing->buffer_room, sizeof *capturing->buffers);
        capturing->buffers[capturing->buffer_count++] = buffers[i];
    }
}

EXPORT int cuStreamBeginCapture_v2(void *stream, int mode) {
    enter();
    not_while_capturing("cuStreamBeginCapture");
    capturing = calloc(1, sizeof *capturing);
    *capturing = (struct graph){.number = graphs++, .live = 1};
    say("capture");
    return leave(0);
}

EXPORT int cuStreamGetCaptureInfo_v3(void *stream, int *status, void *id, struct graph **graph) {
    enter();
    *status = capturing != NULL;
    if (graph) *graph = capturing;
    return leave(0);
}

EXPORT int cuGraphGetNodes(struct graph *graph, void *nodes, size_t *count) {
    enter();
    *count = graph->counted = graph->nodes;
    return leave(0);
}

EXPORT int cuStreamEndCapture(void *stream, struct graph **graph) {
    enter();
    if (!capturing) wrong("cuStreamEndCapture without a capture");
    if (capturing->counted < capturing->nodes)
        wrong("the last node of a captured graph was not counted (note_launch), so it has no op");
    say("captured g%zu %zu", capturing->number, capturing->nodes);
    *graph = capturing;
    capturing = NULL;
    return leave(0);
}

static struct graph *usable(struct graph *graph, const char *what) {
    not_while_capturing(what);
    if (!graph || !graph->live) wrong("%s of a graph that was given back", what);
    return graph;
}

EXPORT int cuGraphInstantiateWithFlags(struct graph **exec, struct graph *graph, uint64_t flags) {
    enter();
    *exec = usable(graph, "cuGraphInstantiate");
    say("instantiate g%zu", graph->number);
    return leave(0);
}

EXPORT int cuGraphUpload(struct graph *exec, void *stream) {
    enter();
    say("upload g%zu", usable(exec, "cuGraphUpload")->number);
    return leave(0);
}

EXPORT int cuGraphLaunch(struct graph *exec, void *stream) {
    enter();
    usable(exec, "cuGraphLaunch");
    for (size_t i = 0; i < exec->buffer_count; i++)
        if (!device[exec->buffers[i]].live)
            wrong("cuGraphLaunch of g%zu: a node has an address in b%zu, which was given back", exec->number,
                  exec->buffers[i]);
    worth += exec->worth;
    later((struct work){.what = "a graph"});
    say("replay g%zu", exec->number);
    return leave(0);
}

EXPORT int cuGraphExecDestroy(struct graph *exec) {
    enter();
    exec->live = 0;
    return leave(0);
}

EXPORT int cuGraphDestroy(struct graph *graph) {
    enter();
    graph->live = 0;
    free(graph->buffers);
    graph->buffers = NULL;
    graph->buffer_count = 0;
    return leave(0);
}

/* ---- Events ---- */

struct event {
    size_t number;
    int timed;
    uint64_t until, worth;
};
static size_t events;

EXPORT int cuEventCreate(struct event **event, unsigned flags) {
    enter();
    *event = calloc(1, sizeof **event);
    **event = (struct event){.number = events++, .timed = !(flags & 2)};
    say("event e%zu %s", (*event)->number, (*event)->timed ? "timed" : "plain");
    return leave(0);
}

EXPORT int cuEventDestroy_v2(struct event *event) {
    free(event);
    return 0;
}

EXPORT int cuEventRecord(struct event *event, void *stream) {
    enter();
    not_while_capturing("cuEventRecord");
    event->until = launched;
    event->worth = worth;
    say("record e%zu", event->number);
    return leave(0);
}

EXPORT int cuEventQuery(struct event *event) {
    enter();
    return leave(event->until <= finished ? 0 : 600);
}

EXPORT int cuEventSynchronize(struct event *event) {
    enter();
    not_while_capturing("cuEventSynchronize");
    int code = outcome("cuEventSynchronize");
    finish(event->until);
    say("wait e%zu", event->number);
    return leave(code);
}

EXPORT int cuEventElapsedTime_v2(float *milliseconds, struct event *from, struct event *to) {
    enter();
    if (!from->timed || !to->timed) wrong("the time of an event without one was asked for");
    if (to->until > finished) return leave(600);
    uint64_t between = mix(to->worth - from->worth + mix(number("HOLLOW_SEED", 1)));
    *milliseconds = 0.04f + between % 80000 / 1e6f;
    say("elapsed e%zu e%zu", from->number, to->number);
    return leave(0);
}

static int wait_for_all(const char *function, const char *what) {
    enter();
    not_while_capturing(function);
    int code = outcome(function);
    finish(launched);
    say("sync %s", what);
    return leave(code);
}

EXPORT int cuStreamSynchronize(void *stream) { return wait_for_all("cuStreamSynchronize", "stream"); }
EXPORT int cuCtxSynchronize(void) { return wait_for_all("cuCtxSynchronize", "context"); }

/* ---- Copies ---- */

EXPORT int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) {
    char place[64];
    enter();
    not_while_capturing("cuMemcpyHtoD");
    if (bytes) {
        device_place(to, bytes, "cuMemcpyHtoD", place);
        say("htod %s %zu data=%016lx", place, bytes, (unsigned long)hash_of(from, bytes));
    }
    return leave(0);
}

EXPORT int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) {
    char place[64];
    enter();
    not_while_capturing("cuMemcpyDtoH");
    if (bytes) {
        device_place(from, bytes, "cuMemcpyDtoH", place);
        memset(to, 0, bytes);
        say("dtoh %s %zu", place, bytes);
    }
    return leave(0);
}

EXPORT int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
    char place[64];
    enter();
    size_t buffer = device_place(to, bytes, "cuMemcpyHtoDAsync", place);
    node(0, &buffer, 1);
    later((struct work){.what = "cuMemcpyHtoDAsync", .from = from, .bytes = bytes});
    say("htod-async %s %zu data=%016lx", place, bytes, (unsigned long)hash_of(from, bytes));
    return leave(0);
}

EXPORT int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) {
    char place[64];
    enter();
    size_t buffer = device_place(from, bytes, "cuMemcpyDtoHAsync", place);
    node(0, &buffer, 1);
    say("dtoh-async %s %zu", place, bytes);
    return leave(0);
}

EXPORT int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *stream) {
    char places[2][64];
    enter();
    size_t buffers[] = {device_place(to, bytes, "cuMemcpyDtoDAsync", places[0]),
                        device_place(from, bytes, "cuMemcpyDtoDAsync", places[1])};
    node(mix(bytes), buffers, 2);
    say("dtod-async %s %s %zu", places[0], places[1], bytes);
    return leave(0);
}

EXPORT int cuMemsetD8_v2(uint64_t to, unsigned char byte, size_t bytes) {
    char place[64];
    enter();
    not_while_capturing("cuMemsetD8");
    if (bytes) {
        device_place(to, bytes, "cuMemsetD8", place);
        say("fill %s %zu with %u", place, bytes, byte);
    }
    return leave(0);
}

/* ---- Kernels ---- */

#define MOST_ARGUMENTS 16
struct kernel {
    char name[64];
    int arguments, sizes[MOST_ARGUMENTS], shared;
};
static struct kernel *kernels;
static size_t kernel_count, kernel_room;

static void read_table(void) {
    const char *path = getenv("HOLLOW_ARGUMENTS");
    FILE *file = fopen(path ? path : "", "r");
    char line[512];
    if (!file) wrong("HOLLOW_ARGUMENTS names no file: %s", path ? path : "");
    while (fgets(line, sizeof line, file)) {
        struct kernel kernel = {{0}};
        int at;
        if (line[0] == '#' || sscanf(line, "%63s%n", kernel.name, &at) != 1) continue;
        for (int read; sscanf(line + at, "%d%n", &kernel.sizes[kernel.arguments], &read) == 1; at += read)
            if (++kernel.arguments == MOST_ARGUMENTS) wrong("%s has more arguments than there is room for", kernel.name);
        kernels = more(kernels, kernel_count, &kernel_room, sizeof *kernels);
        kernels[kernel_count++] = kernel;
    }
    fclose(file);
}

EXPORT int cuModuleGetFunction(struct kernel **function, void *module, const char *name) {
    enter();
    if (!kernels) read_table();
    for (size_t i = 0; i < kernel_count; i++)
        if (!strcmp(kernels[i].name, name)) {
            *function = &kernels[i];
            return leave(0);
        }
    fprintf(stderr, "hollow driver: %s is not in the table of kernels' arguments\n", name);
    return leave(500);
}

EXPORT int cuFuncSetAttribute(struct kernel *kernel, int which, int value) {
    enter();
    if (which != 8) wrong("attribute %d of a kernel", which);
    kernel->shared = value;
    say("allow %s %d", kernel->name, value);
    return leave(0);
}

static char *put_number(char *out, uint32_t value) { return out + sprintf(out, value >> 24 ? " x%08x" : " %u", value); }

struct line {
    char text[4096], *end;
    size_t buffers[64], count;
    const char *what;
};

/* Eight bytes: an address, or a number where they are an argument `alone`, or two numbers. */
static void put_word(struct line *line, const unsigned char *at, int alone) {
    uint64_t word;
    uint32_t halves[2];
    memcpy(&word, at, 8);
    memcpy(halves, at, 8);
    struct range *range;
    if (word >= DEVICE_BASE && word < next_address) {
        *line->end++ = ' ';
        line->buffers[line->count++ % 64] = device_place(word, 1, line->what, line->end);
        line->end += strlen(line->end);
    } else if ((range = host_range(word))) {
        line->end += sprintf(line->end, " h%zu", (size_t)(range - host));
        if (word - range->at) line->end += sprintf(line->end, "+%lu", (unsigned long)(word - range->at));
    } else if (alone) {
        line->end += sprintf(line->end, word >> 24 ? " x%016lx" : " %lu", (unsigned long)word);
    } else {
        line->end = put_number(put_number(line->end, halves[0]), halves[1]);
    }
}

static void put_argument(struct line *line, const unsigned char *at, int bytes) {
    uint32_t number = 0;
    int alone = bytes == 8;
    if (bytes > 8) line->end += sprintf(line->end, " {");
    for (; bytes >= 8; bytes -= 8, at += 8) {
        /* Most of a tensor map is empty. */
        if (bytes >= 16 && !at[0] && !memcmp(at, at + 1, bytes - 1)) {
            line->end += sprintf(line->end, " 0*%d", bytes / 4);
            bytes = 0;
            break;
        }
        put_word(line, at, alone);
    }
    if (bytes) {
        memcpy(&number, at, bytes < 4 ? bytes : 4);
        line->end = put_number(line->end, number);
    }
}

static int close_argument(struct line *line, int bytes) {
    if (bytes > 8) line->end += sprintf(line->end, " }");
    return bytes;
}

static uint64_t value_of(const char *name, const uint32_t *grid) {
    uint64_t value = hash_of(name, strlen(name));
    for (int i = 0; i < 3; i++) value = mix(value + grid[i]);
    return value;
}

struct attribute {
    uint32_t id, padding;
    union {
        uint32_t words[16];
    } value;
};
struct config {
    uint32_t grid[3], block[3], shared;
    void *stream;
    struct attribute *attributes;
    uint32_t attribute_count;
};

static void check_shape(const struct config *config, struct kernel *kernel) {
    const uint32_t *grid = config->grid, *block = config->block;
    uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
    if (!grid[0] || !grid[1] || !grid[2] || grid[0] >> 31 || grid[1] > 65535 || grid[2] > 65535)
        wrong("%s: no GPU takes a grid of %u x %u x %u", kernel->name, grid[0], grid[1], grid[2]);
    if (!threads || threads > 1024) wrong("%s: no GPU takes a block of %lu threads", kernel->name, (unsigned long)threads);
    if (config->shared > 48 << 10 && (int)config->shared > kernel->shared)
        wrong("%s: %u bytes of shared memory, allowed are %d", kernel->name, config->shared, kernel->shared);
}

/* Where a kernel reads or leaves what the host has in page-locked memory. */
static void note_host_memory(struct kernel *kernel, const struct config *config, void **parameters) {
    int host_argument = !strcmp(kernel->name, "argmax_f32")     ? 3
                        : !strcmp(kernel->name, "argmax_tiles") ? 4
                        : !strcmp(kernel->name, "sample_f32")   ? 5
                                                                : -1;
    if (host_argument >= 0) {
        uint32_t *tokens = *(uint32_t **)parameters[host_argument], rows = config->grid[1];
        if (!strcmp(kernel->name, "argmax_tiles")) rows = *(uint32_t *)parameters[2];
        struct range *range = tokens ? host_range((uint64_t)tokens) : NULL;
        if (tokens && (!range || (uint64_t)(tokens + rows) > range->at + range->bytes))
            wrong("%s: %u tokens do not fit where the host wants them", kernel->name, rows);
        later((struct work){.what = kernel->name, .tokens = tokens, .count = tokens ? rows : 0});
    } else if (!strcmp(kernel->name, "copy_inputs")) {
        const void *from = *(void **)parameters[0];
        size_t bytes = 16 * (size_t) * (uint32_t *)parameters[2];
        struct range *range = host_range((uint64_t)from);
        if (!range || (uint64_t)from + bytes > range->at + range->bytes)
            wrong("copy_inputs: %zu bytes are not all page-locked memory", bytes);
        device_place(*(uint64_t *)parameters[1], bytes, "copy_inputs", NULL);
        later((struct work){.what = "copy_inputs", .from = from, .bytes = bytes});
    } else {
        later((struct work){.what = kernel->name});
    }
}

EXPORT int cuLaunchKernelEx(const struct config *config, struct kernel *kernel, void **parameters, void **extra) {
    enter();
    int code = outcome("cuLaunchKernelEx");
    if (code) return leave(code);
    check_shape(config, kernel);
    static struct line line;
    line.end = line.text;
    line.count = 0;
    line.what = kernel->name;
    *line.end = 0;
    for (int i = 0; i < kernel->arguments; i++) {
        put_argument(&line, parameters[i], kernel->sizes[i]);
        close_argument(&line, kernel->sizes[i]);
    }
    char attributes[64] = "", *end = attributes;
    for (uint32_t i = 0; i < config->attribute_count; i++) {
        const struct attribute *one = &config->attributes[i];
        if (one->id == 6) end += sprintf(end, one->value.words[0] ? " overlap" : "");
        else if (one->id == 4) {
            if (!one->value.words[0] || config->grid[0] % one->value.words[0])
                wrong("%s: %u blocks in clusters of %u", kernel->name, config->grid[0], one->value.words[0]);
            end += sprintf(end, " cluster %u", one->value.words[0]);
        } else wrong("%s: attribute %u of a launch", kernel->name, one->id);
    }
    if (!strcmp(kernel->name, "copy_inputs"))
        line.end += sprintf(line.end, " data=%016lx",
                            (unsigned long)hash_of(*(void **)parameters[0], 16 * (size_t) * (uint32_t *)parameters[2]));
    node(value_of(kernel->name, config->grid), line.buffers, line.count < 64 ? line.count : 64);
    note_host_memory(kernel, config, parameters);
    say("launch %s %ux%ux%u %u %u%s |%s", kernel->name, config->grid[0], config->grid[1], config->grid[2],
        config->block[0], config->shared, attributes, line.text);
    return leave(0);
}

/* For the hollow cuBLASLt: a launch of `name` with one struct of arguments. */
EXPORT void hollow_launch(const char *name, const uint32_t *grid, const void *arguments, int bytes) {
    enter();
    static struct line line;
    line.end = line.text;
    line.count = 0;
    line.what = name;
    put_argument(&line, arguments, bytes);
    close_argument(&line, bytes);
    node(value_of(name, grid), line.buffers, line.count < 64 ? line.count : 64);
    later((struct work){.what = name});
    say("launch %s %ux%ux%u 0 0 |%s", name, grid[0], grid[1], grid[2], line.text);
    leave(0);
}

/* ---- Tensor maps ---- */

/* What is asked for goes into the map's 128 bytes, and so into the arguments of launches. */
EXPORT int cuTensorMapEncodeTiled(uint64_t *map, int type, uint32_t rank, uint64_t address, const uint64_t *sizes,
                                  const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                                  int swizzle, int promotion, int fill) {
    static const int widths[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
    char place[64];
    enter();
    if (rank != 2 || type < 0 || type > 9) wrong("a tensor map of rank %u and type %d", rank, type);
    if (address % 16 || strides[0] % 16 || !sizes[0] || !sizes[1] || box[0] > 256 || box[1] > 256) return leave(1);
    device_place(address, strides[0] * (sizes[1] - 1) + sizes[0] * widths[type], "cuTensorMapEncodeTiled", place);
    memset(map, 0, 128);
    map[0] = address;
    memcpy(map + 1, sizes, 16);
    map[3] = strides[0];
    uint32_t rest[] = {box[0], box[1], steps[0], steps[1], type, interleave, swizzle, promotion, fill};
    memcpy(map + 4, rest, sizeof rest);
    say("map %s %lux%lu by %lu box %ux%u steps %ux%u type %d interleave %d swizzle %d promotion %d fill %d", place,
        (unsigned long)sizes[0], (unsigned long)sizes[1], (unsigned long)strides[0], box[0], box[1], steps[0], steps[1],
        type, interleave, swizzle, promotion, fill);
    return leave(0);
}
