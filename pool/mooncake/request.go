package mooncake

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"time"
)

// request is one frame to a helper and the answer to it. The last one to need its place frees it:
// the caller that got the answer or, after the caller left, the helper's reader or end.
type request struct {
	frame   func(id uint64) any
	free    func()              // frees the place
	tally   func(codes []int64) // judges the answer, also after the caller left; may be nil
	answer  chan []int64        // cap 1; closed without an answer if the helper ended
	started time.Time
	over    chan struct{} // closed when the helper is done with it or has ended; for a request whose caller left

	// Under the helper's mutex:
	id   uint64
	sent bool
	left bool // the caller does not wait any more
}

// settle ends a request that is no longer pending. codes is nil if the helper ended.
func (r *request) settle(codes []int64) {
	if r.left {
		r.free()
		close(r.over)
		return
	}
	if codes != nil {
		r.answer <- codes
	}
	close(r.answer)
}

// submit hands a request to the helper. It returns false if the helper has ended or is about to.
func (h *helper) submit(r *request) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mu.over || h.mu.killed != nil {
		return false
	}
	h.mu.last++
	r.id, r.started, r.answer, r.over = h.mu.last, time.Now(), make(chan []int64, 1), make(chan struct{})
	h.mu.pending[r.id] = r
	h.send <- r // does not block: each request has a place
	return true
}

// abandon marks a request whose caller leaves. It reports whether the helper may be working on it,
// and whether it was answered meanwhile; the caller then has not left.
func (h *helper) abandon(r *request) (working, answered bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mu.pending[r.id] != r {
		return false, true
	}
	r.left = true
	return r.sent, false
}

// write sends requests. It drops those whose callers left before.
func (h *helper) write() {
	for r := range h.send {
		if !h.sending(r) {
			continue
		}
		if _, err := h.conn.Write(encode(r.frame(r.id))); err != nil {
			h.killFor(err)
		}
	}
}

func (h *helper) sending(r *request) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mu.pending[r.id] != r {
		return false
	}
	if r.left {
		delete(h.mu.pending, r.id)
		r.settle(nil)
		return false
	}
	r.sent = true
	return true
}

// read delivers answers until the helper ends or sends an invalid frame.
func (h *helper) read() {
	for {
		b, err := readFrame(h.conn)
		if err != nil {
			select {
			case <-h.reaped: // why returns the reason
			case <-time.After(grace):
				h.killFor(err)
			}
			return
		}
		r, err := decodeReply(b)
		if err == nil && !h.deliver(r) {
			err = fmt.Errorf("%w: an answer to no open request", errFrame)
		}
		if err != nil {
			h.killFor(err)
			return
		}
	}
}

func (h *helper) deliver(a reply) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	r := h.mu.pending[a.ID]
	if r == nil || !r.sent {
		return false
	}
	delete(h.mu.pending, a.ID)
	if r.tally != nil {
		r.tally(a.Codes)
	}
	r.settle(a.Codes)
	return true
}

var errHung = errors.New("it does not answer")

// watch kills a helper that takes too long for a request.
func (h *helper) watch(silence time.Duration) {
	tick := time.NewTicker(max(silence/8, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-h.reaped:
			return
		case <-tick.C:
			if oldest := h.oldest(); oldest > silence {
				h.killFor(fmt.Errorf("%w for %v", errHung, oldest.Round(time.Millisecond)))
			}
		}
	}
}

func (h *helper) oldest() (age time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, r := range h.mu.pending {
		age = max(age, time.Since(r.started))
	}
	return age
}

// tail keeps the end of a process's output.
type tail struct {
	mu  sync.Mutex
	end []byte
}

const tailBytes = 4096

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.end = append(t.end, p...)
	if extra := len(t.end) - tailBytes; extra > 0 {
		t.end = append(t.end[:0], t.end[extra:]...)
	}
	return len(p), nil
}

// reason returns the helper's own last line; Mooncake's may have the metadata server's password.
func (t *tail) reason() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	at := bytes.LastIndex(t.end, []byte(module+": "))
	if at < 0 {
		return ""
	}
	line, _, _ := bytes.Cut(t.end[at:], []byte("\n"))
	return string(line)
}

// last returns the last line, of a helper whose output has no secrets.
func (t *tail) last() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return lastLine(t.end)
}
