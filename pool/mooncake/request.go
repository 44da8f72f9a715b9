package mooncake

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"time"
)

// request is one frame to a helper and the answer to it. Its place is given back by whoever is the last to need it: the caller who got the
// answer, or, after a caller left, the helper's reader or end.
type request struct {
	encode  func(id uint64) []byte
	free    func()              // gives the place back
	tally   func(codes []int64) // counts what the answer changed in the store, also when the caller has left; may be nil
	answer  chan []int64        // of one; closed without: the helper is gone
	started time.Time
	over    chan struct{} // closed when the helper has done with it, or is gone; of one whose caller left

	// Under the helper's mutex:
	id   uint64
	sent bool
	left bool // nobody waits
}

// settle ends a request that is not pending any more. Nil: the helper is gone.
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

// submit hands a request over. False: the helper is gone, or about to be.
func (h *helper) submit(r *request) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mu.over || h.mu.killed != nil {
		return false
	}
	h.mu.last++
	r.id, r.started, r.answer, r.over = h.mu.last, time.Now(), make(chan []int64, 1), make(chan struct{})
	h.mu.pending[r.id] = r
	h.send <- r // has room: each request has a place
	return true
}

// abandon is a caller leaving. It says whether the helper may be at work on the request, and whether it was answered meanwhile: then the caller has not left.
func (h *helper) abandon(r *request) (working, answered bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mu.pending[r.id] != r {
		return false, true
	}
	r.left = true
	return r.sent, false
}

// write sends requests; those whose callers left before are dropped.
func (h *helper) write() {
	for r := range h.send {
		if !h.sending(r) {
			continue
		}
		if _, err := h.conn.Write(r.encode(r.id)); err != nil {
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

// read hands answers out, until the helper is gone or says what it may not say.
func (h *helper) read() {
	for {
		b, err := readFrame(h.conn)
		if err != nil {
			select {
			case <-h.reaped: // by itself: why says how
			case <-time.After(grace):
				h.killFor(err)
			}
			return
		}
		r, err := decodeReply(b)
		if err == nil && !h.deliver(r) {
			err = fmt.Errorf("%w: an answer that nobody waits for", errFrame)
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
	r := h.mu.pending[a.id]
	if r == nil || !r.sent {
		return false
	}
	delete(h.mu.pending, a.id)
	if r.tally != nil {
		r.tally(a.codes)
	}
	r.settle(a.codes)
	return true
}

var errHung = errors.New("it answers nothing")

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

// tail is the end of what a process wrote.
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

// reason is what the helper itself said last: Mooncake's own lines may hold a password of the metadata server.
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
