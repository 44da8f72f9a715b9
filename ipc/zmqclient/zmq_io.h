// One call per message on a libzmq socket. Only socket.go includes this.
//
// Go's runtime interrupts threads by signals, so every call continues after EINTR, also between
// two frames of one message.
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <zmq.h>

enum { KV_OK = 0, KV_TIMEOUT = 1, KV_HEAD = 16, KV_FIRST = 4096 };

// A message, its frames one after the other in buf. All memory is malloc's.
typedef struct {
	char *buf;
	size_t len, cap;   // bytes
	int32_t *ends;     // ends[i] is where frame i ends in buf
	int kept, ends_cap;
	int frames;        // of the message, kept or not
	uint64_t bytes;    // of the message, kept or not
	int over;          // it was too large: from the frame on that was, only KV_HEAD bytes of that one are kept
} kv_rx;

static void kv_free(kv_rx *rx) {
	free(rx->buf);
	free(rx->ends);
	memset(rx, 0, sizeof *rx);
}

// kv_room makes room for n more bytes and one more frame; 0 if there is no memory.
static int kv_room(kv_rx *rx, size_t n) {
	if (rx->len + n > rx->cap) {
		size_t cap = rx->cap ? rx->cap : KV_FIRST;
		while (cap < rx->len + n)
			cap *= 2;
		char *buf = realloc(rx->buf, cap);
		if (!buf)
			return 0;
		rx->buf = buf;
		rx->cap = cap;
	}
	if (rx->kept == rx->ends_cap) {
		int cap = rx->ends_cap ? 2 * rx->ends_cap : 64;
		int32_t *ends = realloc(rx->ends, cap * sizeof *ends);
		if (!ends)
			return 0;
		rx->ends = ends;
		rx->ends_cap = cap;
	}
	return 1;
}

static void kv_keep(kv_rx *rx, zmq_msg_t *m, size_t max_bytes, int max_frames) {
	size_t n = zmq_msg_size(m);
	rx->frames++;
	rx->bytes += n;
	if (rx->over)
		return;
	if (rx->kept >= max_frames || rx->len + n > max_bytes) {
		rx->over = 1;
		if (n > KV_HEAD)
			n = KV_HEAD;
	}
	if (!kv_room(rx, n)) {
		rx->over = 1;
		return;
	}
	memcpy(rx->buf + rx->len, zmq_msg_data(m), n);
	rx->len += n;
	rx->ends[rx->kept++] = (int32_t)rx->len;
}

static long kv_now_ms(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000L + t.tv_nsec / 1000000L;
}

// kv_wait waits for a message until end, a time of kv_now_ms.
static int kv_wait(void *sock, long end) {
	zmq_pollitem_t item = {sock, 0, ZMQ_POLLIN, 0};
	for (;;) {
		long left = end - kv_now_ms();
		int n = zmq_poll(&item, 1, left > 0 ? left : 0);
		if (n > 0)
			return KV_OK;
		if (n < 0 && zmq_errno() != EINTR)
			return -zmq_errno();
		if (left <= 0)
			return KV_TIMEOUT;
	}
}

// kv_receive receives one whole message. A negative timeout_ms is no limit; it then blocks in
// libzmq's receive, because polling costs two more system calls. It returns a negative errno on
// failure.
static int kv_receive(void *sock, long timeout_ms, size_t max_bytes, int max_frames, kv_rx *rx) {
	long end = timeout_ms < 0 ? -1 : kv_now_ms() + timeout_ms;
	int flags = timeout_ms < 0 ? 0 : ZMQ_DONTWAIT;
	int rc = KV_OK;
	zmq_msg_t m;
	zmq_msg_init(&m);
	rx->len = rx->bytes = 0;
	rx->kept = rx->frames = rx->over = 0;
	for (;;) {
		if (zmq_msg_recv(&m, sock, flags) >= 0) {
			kv_keep(rx, &m, max_bytes, max_frames);
			if (!zmq_msg_more(&m))
				break;
			continue;
		}
		int e = zmq_errno();
		if (e == EINTR)
			continue;
		rc = e == EAGAIN && flags ? kv_wait(sock, end) : -e;
		if (rc != KV_OK)
			break;
	}
	zmq_msg_close(&m);
	return rc;
}

// kv_send sends n frames of buf without waiting. A negative answer is an errno.
static int kv_send(void *sock, const char *buf, const int32_t *ends, int n) {
	int32_t from = 0;
	for (int i = 0; i < n; i++) {
		int flags = ZMQ_DONTWAIT | (i + 1 < n ? ZMQ_SNDMORE : 0);
		while (zmq_send(sock, buf + from, ends[i] - from, flags) < 0)
			if (zmq_errno() != EINTR)
				return -zmq_errno();
		from = ends[i];
	}
	return 0;
}
