/* A host that makes one mistake, named by the first argument, with the recording driver in its process. With `none` it makes
   none. */

#include "recorder.c"

static const char *mistake;
static int makes(const char *name) { return !strcmp(mistake, name); }

static struct kernel *kernel(const char *name) {
    struct kernel *found;
    if (cuModuleGetFunction(&found, NULL, name)) exit(3);
    return found;
}

static uint64_t input, output, gone;
static uint32_t *words, *tokens;

static void launch(const char *name, uint32_t grid, uint32_t shared, void **parameters) {
    struct attribute cluster = {.id = 4, .value.words = {makes("uneven clusters") ? 3 : 2, 1, 1}};
    struct config config = {{grid, 1, 1}, {128, 1, 1}, shared, NULL, &cluster, 1};
    cuLaunchKernelEx(&config, kernel(name), parameters, NULL);
}

static void copy_inputs(uint32_t groups) {
    void *from = words;
    launch("copy_inputs", 2, 0, (void *[]){&from, &input, &groups});
}

static void argmax(uint32_t rows) {
    uint32_t tiles = 4;
    launch("argmax_tiles", 2, 0, (void *[]){&input, &tiles, &rows, &output, &tokens});
}

static void gather(uint64_t x) {
    uint32_t columns = 64;
    launch("gather_rows_f32", 2, makes("too much shared memory") ? 60000 : 0, (void *[]){&x, &input, &output, &columns});
}

int main(int count, char **arguments) {
    struct graph *graph, *exec;
    struct event *event;
    uint64_t nodes;
    mistake = arguments[1];
    cuMemAlloc_v2(&input, 4096);
    cuMemAlloc_v2(&output, 4096);
    cuMemAlloc_v2(&gone, 4096);
    cuMemHostAlloc((void **)&words, 256);
    cuMemHostAlloc((void **)&tokens, 64);
    cuEventCreate(&event, 2);
    if (makes("stale address")) cuMemFree_v2(gone);
    gather(gone);
    gather(makes("beyond the end") ? output + 4096 : output);
    if (makes("no blocks")) launch("gather_rows_f32", 0, 0, (void *[]){&input, &input, &output, &nodes});
    cuMemcpyHtoD_v2(makes("long copy") ? input + 4000 : input, words, 256);
    if (makes("freed twice")) cuMemFree_v2(gone), cuMemFree_v2(gone);

    cuStreamBeginCapture_v2(NULL, 0);
    gather(gone);
    if (!makes("node not counted")) cuGraphGetNodes(capturing, NULL, &nodes);
    if (makes("wait in a capture")) cuStreamSynchronize(NULL);
    if (makes("memory in a capture")) cuMemAlloc_v2(&nodes, 64);
    cuStreamEndCapture(NULL, &graph);
    cuGraphInstantiateWithFlags(&exec, graph, 0);
    if (makes("stale address in a graph")) cuMemFree_v2(gone);
    if (makes("graph given back")) cuGraphDestroy(graph);
    cuGraphLaunch(exec, NULL);

    copy_inputs(makes("inputs beyond the end") ? 17 : 16);
    if (makes("host writes early")) words[7]++;
    argmax(makes("tokens beyond the end") ? 20 : 3);
    cuEventRecord(event, NULL);
    if (tokens[0] | tokens[1] | tokens[2]) return 4; /* nobody has waited */
    cuEventSynchronize(event);
    words[7]++;
    return tokens[0] | tokens[1] | tokens[2] ? 0 : 5;
}
