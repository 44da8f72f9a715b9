// Runs the cases, or those whose names hold the first argument.
#include "selftest.h"
#include "machine.h"
#include <dirent.h>

enum { LIMIT_S = 30 }; // of a case

// A CPU that touches device memory ends by the signal itself. Memory that the driver holds when a
// process ends is no leak.
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "handle_segv=0:detect_leaks=0"; }

void want(long got, long wanted, const char *what, const char *file, int line) {
	if (got == wanted)
		return;
	fprintf(stderr, "%s:%d: %s is %ld, not %ld\n", strrchr(file, '/') ? strrchr(file, '/') + 1 : file, line, what, got,
		wanted);
	_exit(1);
}

CUcontext driver(void) {
	CUcontext c;
	OK(cuInit(0));
	OK(cuDevicePrimaryCtxRetain(&c, 0));
	OK(cuCtxSetCurrent(c));
	return c;
}

CUstream stream_new(void) {
	CUstream s;
	OK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	return s;
}

void *pinned(size_t bytes) {
	void *p;
	OK(cuMemHostAlloc(&p, bytes, CU_MEMHOSTALLOC_PORTABLE));
	return p;
}

size_t used(void) {
	size_t n, all;
	OK(cuMemGetInfo(&n, &all));
	return all - n;
}

void pause_ms(int ms) { nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000l}, NULL); }

int64_t live(int what) {
	int64_t n = 0;
	machine_lock();
	machine_sweep();
	for (int s = 0; s < MAX_PROCESSES; s++)
		n += machine->process[s].live[what];
	machine_unlock();
	return n;
}

peer peer_new(void (*run)(peer)) {
	int there[2], back[2];
	TRUE(!pipe(there) && !pipe(back));
	int pid = fork();
	if (!pid) {
		close(there[1]);
		close(back[0]);
		alarm(LIMIT_S);
		run((peer){getppid(), there[0], back[1]});
		_exit(0);
	}
	close(there[0]);
	close(back[1]);
	return (peer){pid, back[0], there[1]};
}

void tell(peer p, const void *what, size_t n) { IS(n, write(p.out, what, n)); }
void hear(peer p, void *what, size_t n) { IS(n, read(p.in, what, n)); }

void peer_kill(peer p) {
	OK(kill(p.pid, SIGKILL));
	IS(p.pid, waitpid(p.pid, NULL, 0));
}

void peer_end(peer p) {
	int status;
	IS(p.pid, waitpid(p.pid, &status, 0));
	IS(0, status);
}

// nothing_left asks as a process that never had the driver, after all of the case are gone.
static void nothing_left(void) {
	OK(machine_open());
	for (int i = 0; i < LIVE_N; i++)
		IS(0, live(i));
	machine_lock();
	IS(0, machine_used(-1));
	machine_unlock();
}

static bool in_child(void (*run)(void), const test_case *t, const char *dir) {
	int pid = fork(), status = 0;
	if (!pid) {
		setenv("SOFTCUDA_DIR", dir, 1);
		for (int i = 0; i < 4 && t->knobs[i]; i++)
			putenv((char *)t->knobs[i]);
		alarm(LIMIT_S);
		OK(machine_open());
		run();
		_exit(0);
	}
	waitpid(pid, &status, 0);
	if (WIFSIGNALED(status))
		fprintf(stderr, "%s: ended by signal %d\n", t->name, WTERMSIG(status));
	return status == 0;
}

// empty removes the files in dir and says how many there were.
static int empty(const char *dir) {
	int n = 0;
	DIR *d = opendir(dir);
	for (struct dirent *e; d && (e = readdir(d));)
		n += unlinkat(dirfd(d), e->d_name, 0) == 0;
	if (d)
		closedir(d);
	return n;
}

static bool run_case(const test_case *t) {
	char dir[] = "/dev/shm/softcuda-selftest.XXXXXX";
	if (!mkdtemp(dir))
		return false;
	bool ok = in_child(t->run, t, dir) && in_child(nothing_left, t, dir);
	int files = empty(dir);
	if (ok && files != 1) { // the machine's own
		fprintf(stderr, "%s: %d files left\n", t->name, files - 1);
		ok = false;
	}
	rmdir(dir);
	printf("%s %s\n", ok ? "ok  " : "FAIL", t->name);
	fflush(stdout);
	return ok;
}

int main(int argc, char **argv) {
	const test_case *lists[] = {alone, together};
	int run = 0, failed = 0;
	for (int l = 0; l < 2; l++)
		for (const test_case *t = lists[l]; t->name; t++) {
			if (argc > 1 && !strstr(t->name, argv[1]))
				continue;
			run++;
			failed += !run_case(t);
		}
	printf("%d cases, %d failed\n", run, failed);
	return failed || !run;
}
