package history

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// Limits of recordings.
const (
	MaxRecordings = 2        // at once
	queueRequests = 4096     // that wait to be taken by one
	queueBytes    = 16 << 20 // of their hashes
)

// ErrTooMany is the error of a recording that is refused.
var ErrTooMany = fmt.Errorf("%d recordings run, allowed: %d at once", MaxRecordings, MaxRecordings)

// Prompt is what an engine asked for.
type Prompt struct {
	At     time.Time
	Space  pool.Fingerprint
	Tokens uint32 // of its whole blocks; 0: the space is not known
	Hashes pool.Hashes
}

// Recording passes on the prompts that engines ask for, each once. It must be closed.
type Recording struct {
	history *History
	wake    chan struct{} // cap 1: there is something to take

	mu      sync.Mutex
	queue   []Prompt
	bytes   int
	dropped uint64 // for lack of room, since the last Next
}

// Record begins a recording.
func (h *History) Record() (*Recording, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.recordings) == MaxRecordings {
		return nil, ErrTooMany
	}
	r := &Recording{history: h, wake: make(chan struct{}, 1)}
	h.recordings = append(h.recordings, r)
	return r, nil
}

// Recordings returns how many run.
func (h *History) Recordings() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.recordings)
}

// Close ends the recording.
func (r *Recording) Close() {
	h := r.history
	h.mu.Lock()
	defer h.mu.Unlock()
	h.recordings = slices.DeleteFunc(h.recordings, func(one *Recording) bool { return one == r })
}

// recordLocked passes on a look-up that is for a request: no probe, not again after an answer that
// was pending, and of a client that may use the space.
func (h *History) recordLocked(l, old *Lookup, hashTokens uint32, req *ipc.LookupRequest) {
	if len(h.recordings) == 0 || l.isProbe() || old != nil && !old.isProbe() || l.Status == ipc.LookupMalformed ||
		l.Status == ipc.LookupNotRegistered {
		return
	}
	p := Prompt{
		At: time.Unix(0, l.At), Space: l.Space, Tokens: l.Blocks * hashTokens,
		Hashes: pool.Chain(slices.Clone(req.Hashes), req.HashLen),
	}
	for _, r := range h.recordings {
		r.add(p)
	}
}

func (l *Lookup) isProbe() bool { return l.Form == ipc.FormOwn && l.Want == ipc.WantProbe }

func (r *Recording) add(p Prompt) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.queue) == queueRequests || r.bytes+len(p.Hashes.Blob) > queueBytes {
		r.dropped++
	} else {
		r.queue = append(r.queue, p)
		r.bytes += len(p.Hashes.Blob)
	}
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Next waits for prompts and returns them, with the number of those that found no room before them.
func (r *Recording) Next(ctx context.Context) (list []Prompt, dropped uint64, err error) {
	for {
		r.mu.Lock()
		list, dropped = r.queue, r.dropped
		r.queue, r.bytes, r.dropped = nil, 0, 0
		r.mu.Unlock()
		if len(list) > 0 || dropped > 0 {
			return list, dropped, nil
		}
		select {
		case <-r.wake:
		case <-ctx.Done():
			return nil, 0, ctx.Err()
		}
	}
}
