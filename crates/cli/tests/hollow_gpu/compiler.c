/* A run-time compiler that makes nothing of everything, or with HOLLOW_COMPILE_ERROR refuses it; with HOLLOW_COMPILE_MS it
   takes its time. */

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char LOG[] = "rows.cu(7): error: identifier \"nonsense\" is undefined";
static const char CODE[] = "\x7f" "ELF of nothing";

#ifndef MAJOR
#define MAJOR 13
#endif
int nvrtcVersion(int *major, int *minor) { *major = MAJOR; *minor = 1; return 0; }
int nvrtcCreateProgram(void **program) { *program = (void *)8; return 0; }
int nvrtcCompileProgram(void *program) {
    const char *milliseconds = getenv("HOLLOW_COMPILE_MS");
    if (milliseconds) usleep(1000 * atoi(milliseconds));
    return getenv("HOLLOW_COMPILE_ERROR") ? 6 : 0;
}
int nvrtcGetProgramLogSize(void *program, size_t *size) { *size = sizeof LOG; return 0; }
int nvrtcGetProgramLog(void *program, char *log) { memcpy(log, LOG, sizeof LOG); return 0; }
int nvrtcGetCUBINSize(void *program, size_t *size) { *size = sizeof CODE; return 0; }
int nvrtcGetCUBIN(void *program, char *code) { memcpy(code, CODE, sizeof CODE); return 0; }
int nvrtcDestroyProgram(void **program) { return 0; }
