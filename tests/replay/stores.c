/* Has the process killed at the n-th store to some shared mappings, whatever instruction makes it.
 *
 * The mappings are read-only: a store faults, is counted, and made as a single step of the
 * processor. x86-64 only. Signals SIGSEGV and SIGTRAP are taken from the process. */
#define _GNU_SOURCE
#include <signal.h>
#include <stddef.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

enum { REGIONS = 16, TRAP_FLAG = 0x100 };

static struct {
    char *start;
    size_t size;
} regions[REGIONS];
static int count;
static volatile long stores, fatal;

static void protect(int how) {
    for (int i = 0; i < count; i++) mprotect(regions[i].start, regions[i].size, how);
}

static void on_fault(int number, siginfo_t *info, void *context) {
    char *at = info->si_addr;
    for (int i = 0; i < count; i++)
        if (at >= regions[i].start && at < regions[i].start + regions[i].size) {
            if (++stores == fatal) kill(getpid(), SIGKILL);
            protect(PROT_READ | PROT_WRITE);
            ((ucontext_t *)context)->uc_mcontext.gregs[REG_EFL] |= TRAP_FLAG;
            return;
        }
    signal(number, SIG_DFL);
}

static void on_step(int number, siginfo_t *info, void *context) {
    (void)number, (void)info;
    ((ucontext_t *)context)->uc_mcontext.gregs[REG_EFL] &= ~TRAP_FLAG;
    protect(PROT_READ);
}

void watch(void *start, size_t size) {
    regions[count].start = start;
    regions[count++].size = size;
}

/* Die before the store `at`, counted from 1; 0: count only. */
void arm(long at) {
    struct sigaction action = {0};
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    action.sa_sigaction = on_fault;
    sigaction(SIGSEGV, &action, NULL);
    action.sa_sigaction = on_step;
    sigaction(SIGTRAP, &action, NULL);
    stores = 0;
    fatal = at;
    protect(PROT_READ);
}

long disarm(void) {
    protect(PROT_READ | PROT_WRITE);
    return stores;
}
