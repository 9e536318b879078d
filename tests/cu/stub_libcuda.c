/* A libcuda.so.1 with host memory for a device: enough of the driver API to see what the real bindings make of the
 * arguments that DriverBackend passes. Work runs when it is enqueued; a capture records it and a graph launch replays
 * it. The one kernel it knows is ds41_slot_table_set. Layouts and numbers are the driver ABI's.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <dlfcn.h>

typedef int R; /* CUresult */
enum { OK = 0, INVALID = 1, NO_CONTEXT = 201, ILLEGAL_STATE = 401, NOT_FOUND = 500 };
typedef unsigned long long ptr;

typedef struct { unsigned int x, y, z, bx, by, bz, shared; uint64_t values[5]; void *params[5]; } Kernel;
typedef struct { char kind; /* k, c, f */ void *dst; const void *src; size_t n; int byte, dst_host, src_host; Kernel k; } Node;
typedef struct { Node nodes[16]; int n; } Graph;
typedef struct { int flags; Graph *capture; } Stream;

static void *context;
static int retained;
static char log_text[1024];
static struct { char *start; size_t n; int host; } owned[64];

R cuGetProcAddress_v2(const char *name, void **fn, int version, uint64_t flags, int *status) {
    /* Bit 1 asks for the variant that takes a null stream for the thread's own. */
    if (getenv("SHOW_DEFAULT_STREAM") && !strcmp(name, "cuMemcpyHtoDAsync")) {
        printf("copies: flags %d\n", (int)flags);
        fflush(stdout);
    }
    Dl_info info;
    dladdr((void *)cuGetProcAddress_v2, &info);
    void *self = dlopen(info.dli_fname, RTLD_NOW);
    *fn = dlsym(self, name);
    if (status) *status = *fn ? 0 : 1;
    return *fn ? OK : NOT_FOUND;
}
R cuGetProcAddress(const char *name, void **fn, int version, uint64_t flags, int *status) {
    return cuGetProcAddress_v2(name, fn, version, flags, status);
}
R cuInit(unsigned flags) { return OK; }
R cuDriverGetVersion(int *v) { *v = 13000; return OK; }
R cuGetErrorName(R code, const char **s) { *s = code == 401 ? "CUDA_ERROR_ILLEGAL_STATE" : "CUDA_ERROR_X"; return OK; }
R cuGetErrorString(R code, const char **s) { *s = "stub text"; return OK; }
R cuDeviceGetCount(int *n) { *n = 1; return OK; }
R cuDeviceGet(int *d, int i) { *d = i; return OK; }
R cuDeviceGetName(char *s, int n, int d) { snprintf(s, n, "Stub GPU"); return OK; }
R cuDeviceTotalMem(size_t *n, int d) { *n = (size_t)80 << 30; return OK; }
R cuDeviceGetAttribute(int *v, int a, int d) {
    *v = a == 75 ? 9 : a == 76 ? 0 : a == 16 ? 132 : a == 97 ? 232448 : a == 38 ? 1 << 20 : -1;
    return OK;
}
R cuDevicePrimaryCtxRetain(void **c, int d) { *c = &retained; retained++; return OK; }
R cuDevicePrimaryCtxRelease(int d) { retained--; return OK; }
R cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) { *flags = 0; *active = retained > 0; return OK; }
R cuCtxSetCurrent(void *c) { context = c; return OK; }
R cuCtxGetCurrent(void **c) { *c = context; return OK; }
R cuCtxSynchronize(void) { return context ? OK : NO_CONTEXT; }

static void own(void *p, size_t n, int host) {
    for (int i = 0; i < 64; i++)
        if (!owned[i].start) { owned[i].start = p; owned[i].n = n; owned[i].host = host; return; }
    abort();
}
static R disown(void *p) {
    for (int i = 0; i < 64; i++)
        if (owned[i].start == p) { owned[i].start = 0; free(p); return OK; }
    return INVALID;
}
R cuMemAlloc(ptr *p, size_t n) {
    if (n > ((size_t)1 << 40)) { strcpy(log_text, "[stub] that is a lot of memory\n"); return 2; }
    void *m = aligned_alloc(256, (n + 255) / 256 * 256);
    own(m, n, 0);
    *p = (ptr)m;
    return OK;
}
R cuMemFree(ptr p) { return disown((void *)p); }
R cuMemHostAlloc(void **p, size_t n, unsigned flags) {
    if (flags != 3) return INVALID;
    *p = aligned_alloc(4096, (n + 4095) / 4096 * 4096);
    own(*p, n, 1);
    return OK;
}
R cuMemFreeHost(void *p) { return disown(p); }
R cuMemHostGetDevicePointer(ptr *d, void *p, unsigned flags) { *d = (ptr)p; return OK; }
R cuMemGetInfo(size_t *f, size_t *t) { *f = 1000; *t = 2000; return OK; }
R cuPointerGetAttribute(void *data, int attribute, ptr p) {
    for (int i = 0; i < 64; i++)
        if (owned[i].start && (char *)p >= owned[i].start && (char *)p < owned[i].start + owned[i].n) {
            if (attribute == 11) *(ptr *)data = (ptr)owned[i].start;
            else if (attribute == 12) *(size_t *)data = owned[i].n;
            else *(unsigned *)data = owned[i].host ? 1 : 2;
            return OK;
        }
    return INVALID;
}

R cuStreamCreate(void **s, unsigned flags) {
    if (flags != 1) return INVALID;
    *s = calloc(1, sizeof(Stream));
    return OK;
}
R cuStreamDestroy(void *s) { free(s); return OK; }
R cuStreamSynchronize(Stream *s) { return s->capture ? 900 : OK; }
R cuStreamIsCapturing(Stream *s, int *status) { *status = s->capture != 0; return OK; }
#ifndef OLD_DRIVER
R cuStreamGetCaptureInfo(Stream *s, int *status, uint64_t *id, Graph **g, Node ***deps, void **data, size_t *n) {
    static Node *last;
    static uint64_t no_data;
    *status = s->capture != 0;
    if (!s->capture) return OK;
    if (id) *id = 7;
    if (g) *g = s->capture;
    last = s->capture->n ? &s->capture->nodes[s->capture->n - 1] : 0;
    if (deps) *deps = &last;
    if (data) *data = &no_data;
    if (n) *n = last != 0;
    return OK;
}
#endif
R cuStreamBeginCapture(Stream *s, int mode) {
    if (mode != 2 || s->capture) return ILLEGAL_STATE;
    s->capture = calloc(1, sizeof(Graph));
    return OK;
}
R cuStreamEndCapture(Stream *s, Graph **g) {
    if (!s->capture) return ILLEGAL_STATE;
    *g = s->capture;
    s->capture = 0;
    return OK;
}
R cuStreamWaitEvent(void *s, void *e, unsigned flags) { return flags ? INVALID : OK; }
R cuEventCreate(void **e, unsigned flags) { *e = malloc(1); *(char *)*e = flags; return OK; }
R cuEventDestroy(void *e) { free(e); return OK; }
R cuEventRecord(void *e, void *s) { return OK; }
R cuEventQuery(void *e) { return OK; }
R cuEventSynchronize(void *e) { return OK; }
R cuEventElapsedTime(float *ms, char *a, char *b) { *ms = 2.5f; return *a == 0 && *b == 0 ? OK : 400; }

static void run_node(Node *node) {
    Kernel *k = &node->k;
    if (node->kind == 'c') memcpy(node->dst, node->src, node->n);
    if (node->kind == 'f') memset(node->dst, node->byte, node->n);
    if (node->kind != 'k') return;
    int *table = (int *)k->values[0], *triples = (int *)k->values[1];
    for (int i = 0; i < triples[0]; i++)
        table[triples[1 + 3 * i] * (unsigned)k->values[3] + triples[2 + 3 * i]] = triples[3 + 3 * i];
}
static R put(Stream *s, Node node) {
    if (!context) return NO_CONTEXT;
    if (!s->capture) { run_node(&node); return OK; }
    s->capture->nodes[s->capture->n++] = node;
    return OK;
}
R cuMemcpyHtoDAsync(ptr d, const void *s, size_t n, Stream *st) {
    return put(st, (Node){.kind = 'c', .dst = (void *)d, .src = s, .n = n, .src_host = 1});
}
R cuMemcpyDtoHAsync(void *d, ptr s, size_t n, Stream *st) {
    return put(st, (Node){.kind = 'c', .dst = d, .src = (void *)s, .n = n, .dst_host = 1});
}
R cuMemcpyDtoDAsync(ptr d, ptr s, size_t n, Stream *st) {
    return put(st, (Node){.kind = 'c', .dst = (void *)d, .src = (void *)s, .n = n});
}
R cuMemsetD8Async(ptr d, unsigned char byte, size_t n, Stream *st) {
    return put(st, (Node){.kind = 'f', .dst = (void *)d, .byte = byte, .n = n});
}

static char module[1], function[1];
static const int sizes[5] = {8, 8, 4, 4, 4}, offsets[5] = {0, 8, 16, 20, 24};
R cuModuleLoadData(void **m, const void *image) {
    *m = module;
    return strstr(image, ".entry ds41_slot_table_set") ? OK : 200;
}
R cuModuleUnload(void *m) { return OK; }
R cuModuleGetFunction(void **f, void *m, const char *name) {
    *f = function;
    return strcmp(name, "ds41_slot_table_set") ? NOT_FOUND : OK;
}
R cuFuncGetAttribute(int *v, int a, void *f) { *v = a == 0 ? 1024 : 0; return OK; }
R cuFuncSetAttribute(void *f, int a, int v) { return a == 8 ? OK : INVALID; }
#ifndef OLD_DRIVER
R cuFuncLoad(void *f) { return f == function ? OK : INVALID; }
R cuFuncGetName(const char **s, void *f) { *s = "ds41_slot_table_set"; return OK; }
R cuFuncGetParamInfo(void *f, size_t i, size_t *off, size_t *n) {
    if (i >= 5) return INVALID;
    *off = offsets[i];
    *n = sizes[i];
    return OK;
}
#endif
R cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                 Stream *st, void **params, void **extra) {
    if (f != function || extra) return INVALID;
    Node node = {.kind = 'k', .k = {x, y, z, bx, by, bz, shared}};
    for (int i = 0; i < 5; i++) memcpy(&node.k.values[i], params[i], sizes[i]);
    return put(st, node);
}

R cuGraphInstantiateWithFlags(void **exec, Graph *g, uint64_t flags) {
    *exec = malloc(sizeof *g);
    memcpy(*exec, g, sizeof *g);
    return flags ? INVALID : OK;
}
R cuGraphInstantiate(void **exec, Graph *g, uint64_t flags) { return cuGraphInstantiateWithFlags(exec, g, flags); }
R cuGraphLaunch(Graph *exec, Stream *s) {
    for (int i = 0; i < exec->n; i++) put(s, exec->nodes[i]);
    return OK;
}
R cuGraphDestroy(void *g) { free(g); return OK; }
R cuGraphExecDestroy(void *g) { free(g); return OK; }
R cuGraphGetNodes(Graph *g, Node **out, size_t *n) {
    for (int i = 0; out && i < (int)*n; i++) out[i] = i < g->n ? &g->nodes[i] : 0;
    *n = g->n;
    return OK;
}
R cuGraphGetEdges(Graph *g, Node **from, Node **to, void *data, size_t *n) {
    for (int i = 0; from && i < (int)*n; i++) { from[i] = &g->nodes[i]; to[i] = &g->nodes[i + 1]; }
    *n = g->n ? g->n - 1 : 0;
    return OK;
}
R cuGraphNodeGetType(Node *node, int *type) { *type = node->kind == 'k' ? 0 : node->kind == 'c' ? 1 : 2; return OK; }
typedef struct { void *func; unsigned x, y, z, bx, by, bz, shared; void **params, **extra; void *kern, *ctx; } KernelParams;
R cuGraphKernelNodeGetParams(Node *node, KernelParams *p) {
    Kernel *k = &node->k;
    for (int i = 0; i < 5; i++) k->params[i] = &k->values[i];
    *p = (KernelParams){function, k->x, k->y, k->z, k->bx, k->by, k->bz, k->shared, k->params};
    return OK;
}
typedef struct {
    size_t x, y, z, lod; int type; const void *host; ptr device; void *array, *reserved; size_t pitch, height;
} Place;
typedef struct { Place src, dst; size_t width, height, depth; } Copy3D;
R cuGraphMemcpyNodeGetParams(Node *node, Copy3D *p) {
    memset(p, 0, sizeof *p);
    p->width = node->n;
    p->height = p->depth = 1;
    p->src.type = node->src_host ? 1 : 2;
    p->dst.type = node->dst_host ? 1 : 2;
    if (node->src_host) p->src.host = node->src; else p->src.device = (ptr)node->src;
    if (node->dst_host) p->dst.host = node->dst; else p->dst.device = (ptr)node->dst;
    return OK;
}
typedef struct { ptr dst; size_t pitch; unsigned value, element; size_t width, height; } Memset;
R cuGraphMemsetNodeGetParams(Node *node, Memset *p) {
    *p = (Memset){(ptr)node->dst, 0, node->byte, 1, node->n, 1};
    return OK;
}

#ifndef OLD_DRIVER
R cuLogsCurrent(unsigned *at, unsigned flags) { *at = 0; return OK; }
R cuLogsDumpToMemory(unsigned *at, char *buffer, size_t *n, unsigned flags) {
    size_t have = strlen(log_text);
    if (have >= *n) return INVALID;
    strcpy(buffer, log_text);
    *n = have;
    *at = 1;
    log_text[0] = 0;
    return OK;
}
#endif
