package peer

import (
	"context"
	"errors"

	"github.com/kvagent/kvagent/pool"
)

// arrived takes an ask back from its stream.
func (f *fetch) arrived(a *ask) {
	var done []*part
	f.mu.Lock()
	for i, p := range a.parts {
		if status := a.result[i]; status != pool.OK && !p.failed {
			p.failed = true
			switch status {
			case cancelled:
				p.reason = Abandoned
			case badPage:
				p.reason = BadPage
			default:
				p.reason = reasonOf(status)
			}
		}
		if p.left--; p.left == 0 {
			done = append(done, p)
		}
	}
	f.mu.Unlock()
	f.settle(done)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.owed -= a.bytes()
	f.signal()
}

// settle commits blocks of which all shards have arrived, frees those that failed, and counts both.
func (f *fetch) settle(done []*part) {
	if len(done) == 0 {
		return
	}
	var slots []pool.Slot
	var status []pool.Status
	for _, p := range done {
		for shard, has := range p.has {
			if !has {
				continue
			}
			s := pool.OK
			if p.failed {
				s = pool.Busy
			}
			slots, status = append(slots, p.slots[shard]), append(status, s)
		}
	}
	f.committing.Lock()
	defer f.committing.Unlock()
	if len(slots) > 0 {
		f.client.cfg.Slots.Commit(slots, f.request.Epoch, status)
	}
	var of Result
	for _, p := range done {
		bytes, reserved := int64(0), false
		for shard, has := range p.has {
			if !has {
				continue
			}
			if status[0] != pool.OK && !p.failed {
				p.failed, p.reason = true, reasonOf(status[0])
			}
			bytes, reserved = bytes+int64(p.slots[shard].Len), true
			status = status[1:]
		}
		switch {
		case p.again:
		case p.failed:
			of.Failed[p.reason]++
		case !reserved:
			of.Failed[Had]++
		default:
			of.Blocks, of.Bytes = of.Blocks+1, of.Bytes+bytes
		}
	}
	if of.Blocks > 0 {
		f.stored(of.Blocks, of.Bytes)
	}
	f.add(&of, len(done))
}

// add adds the outcome of blocks.
func (f *fetch) add(of *Result, parts int) {
	f.client.stored.Add(uint64(of.Blocks))
	f.mu.Lock()
	defer f.mu.Unlock()
	f.parts -= parts
	f.outcome.Blocks, f.outcome.Bytes = f.outcome.Blocks+of.Blocks, f.outcome.Bytes+of.Bytes
	for i := range of.Failed {
		f.outcome.Failed[i] += of.Failed[i]
	}
	f.signal()
}

// finish returns the result of a fetch that ended with an error, or without one.
func (f *fetch) finish(err error) Result {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := f.outcome
	r.End, r.Tokens, r.Took = f.end, f.tokens, f.result.Took
	switch {
	case err == nil:
	case errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded): // the caller's own
		r.End = EndCancelled
	default:
		r.End = EndLost
	}
	for _, b := range f.later.blocks {
		r.Failed[b.why]++
	}
	counted := r.Blocks
	for _, n := range r.Failed {
		counted += n
	}
	r.Failed[NotStored] += f.total - counted
	return r
}
