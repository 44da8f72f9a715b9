// libzmq 4.3.4 aborts the whole process when it accepts a connection on an ipc socket and no descriptor is free:
// src/ipc_listener.cpp, ipc_listener_t::accept, asserts every errno but a few, and EMFILE is none of them. So any
// client could end the agent, with connections here or with descriptors sent to the session socket.
//
// An executable's own accept4 is found before libc's, also by libzmq. (Go's packages make the system call
// themselves.) This one answers EMFILE by taking the connection with a descriptor kept for that, and dropping
// it: the client tries again later. Left in the queue it would keep libzmq's thread busy for ever.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "zmq_accept.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int spare = -1;
static unsigned long dropped;

static void take_spare(void) {
	if (spare < 0)
		spare = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

void kv_accept_ready(void) {
	pthread_mutex_lock(&lock);
	take_spare();
	pthread_mutex_unlock(&lock);
}

unsigned long kv_accept_dropped(void) {
	pthread_mutex_lock(&lock);
	unsigned long n = dropped;
	pthread_mutex_unlock(&lock);
	return n;
}

// drop_one accepts and closes a connection; 0 if somebody else took the descriptor meanwhile.
static int drop_one(int fd) {
	pthread_mutex_lock(&lock);
	if (spare >= 0)
		close(spare);
	spare = -1;
	int got = syscall(SYS_accept4, fd, NULL, NULL, SOCK_CLOEXEC);
	if (got >= 0)
		close(got);
	take_spare();
	dropped++;
	pthread_mutex_unlock(&lock);
	return got >= 0;
}

int accept4(int fd, struct sockaddr *restrict addr, socklen_t *restrict len, int flags) {
	int got = syscall(SYS_accept4, fd, addr, len, flags);
	if (got >= 0 || (errno != EMFILE && errno != ENFILE))
		return got;
	if (!drop_one(fd)) {
		struct timespec pause = {0, 1000000}; // the connection is still there and will be offered at once
		nanosleep(&pause, NULL);
	}
	errno = ECONNABORTED; // which libzmq expects
	return -1;
}
