// A libnvidia-ml.so.1 for tests, with two GPUs. MODE: 0 plain, 1 no driver, 2 nonsense, 3 every reading fails,
// 4 the second GPU is lost, 5 the temperature never comes, 6 a few functions only.
#include <string.h>
#include <unistd.h>

typedef struct { unsigned gpu, memory; } rates;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory;
enum { SUCCESS = 0, NOT_SUPPORTED = 3, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, UNKNOWN = 999 };

static int gpus[2];
static int lost(void *gpu) { return MODE == 4 && gpu == &gpus[1]; }
static int answer(void *gpu) { return lost(gpu) ? GPU_IS_LOST : MODE == 3 ? UNKNOWN : SUCCESS; }

int nvmlInit_v2(void) { return MODE == 1 ? DRIVER_NOT_LOADED : SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned at, void **gpu) {
    if (at > 1) return 2;
    *gpu = &gpus[at];
    return SUCCESS;
}
int nvmlDeviceGetUUID(void *gpu, char *uuid, unsigned length) {
    if (lost(gpu)) return GPU_IS_LOST;
    strncpy(uuid, gpu == &gpus[0] ? "GPU-aaaa" : "GPU-bbbb", length);
    return SUCCESS;
}
int nvmlDeviceGetTemperature(void *gpu, int sensor, unsigned *celsius) {
    if (MODE == 5) for (;;) sleep(1000);
    *celsius = MODE == 2 ? 4294967295u : gpu == &gpus[0] ? 60 : 86;
    return answer(gpu);
}
#if MODE != 6
int nvmlDeviceGetUtilizationRates(void *gpu, rates *out) {
    out->gpu = MODE == 2 ? 4000000000u : gpu == &gpus[0] ? 40 : 80;
    out->memory = 0;
    return answer(gpu);
}
int nvmlDeviceGetMemoryInfo_v2(void *gpu, memory *out) {
    if (out->version != (sizeof(memory) | 2 << 24)) return 25;
    out->total = MODE == 2 ? 1 : 80ull << 30;
    out->used = MODE == 2 ? ~0ull : gpu == &gpus[0] ? 40ull << 30 : 72ull << 30;
    return answer(gpu);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *gpu, unsigned long long *bits) {
    *bits = MODE == 2 ? ~0ull << 40 : gpu == &gpus[0] ? 1 : 0x20 | 0x8000000000ull;
    return answer(gpu);
}
int nvmlDeviceGetTotalEccErrors(void *gpu, int which, int counter, unsigned long long *count) {
    static unsigned long long grows = 2;
    if (gpu == &gpus[1] && MODE == 0) return NOT_SUPPORTED;
    *count = MODE == 2 ? ~0ull : which == 0 ? 7 : grows++;
    return counter != 0 ? 2 : answer(gpu);
}
#endif
