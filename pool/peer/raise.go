package peer

import "context"

// maxRaises is how often one subscription brings up what only lower tiers have: when it begins, and
// when its transfer has changed since and blocks are still missing.
const maxRaises = 3

// raise brings blocks of a subscription that only lower tiers have into memory, where they are
// announced. The subscription's goroutine owns it.
type raise struct {
	served *served
	sub    *subscription
	cancel context.CancelFunc
	done   chan struct{} // closed when the last one has ended; nil: none runs
	ended  chan struct{} // the same, kept
	began  int
	in     State // of the transfer, when the last one began
}

func (v *served) newRaise(sub *subscription) *raise {
	return &raise{served: v, sub: sub, cancel: func() {}}
}

func (r *raise) runs() bool { return r.done != nil }

// begin begins a raise, and reports whether one runs: none does without tiers, or if none can bring
// more than the last one.
func (r *raise) begin(s State) bool {
	bring := r.served.server.cfg.Raise
	if bring == nil || r.began > 0 && s == r.in || r.began == maxRaises {
		return false
	}
	r.began, r.in = r.began+1, s
	r.cancel() // the last one, which has ended
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	r.cancel, r.done, r.ended = cancel, done, done
	r.served.watchers.Go(func() {
		defer close(done)
		for i := range r.sub.groups {
			g := &r.sub.groups[i]
			bring(ctx, r.sub.space, g.group, g.hashes)
		}
	})
	return true
}

// end ends a raise that runs, and waits for it.
func (r *raise) end() {
	r.cancel()
	if r.ended != nil {
		<-r.ended
	}
}
