package mockengine

// update waits for a step and takes its output: tokens become known, rejected drafts are dropped,
// requests end.
func (e *Engine) update(s *launched) {
	s.work.done.Wait()
	for i := range s.entries {
		if a := &s.entries[i]; a.resets == a.r.resets && a.r.state == stateRunning {
			e.updateOne(a)
		}
	}
	e.idle = append(e.idle, s.work)
}

func (e *Engine) updateOne(a *entry) {
	r := a.r
	r.confirmed = a.pos
	if !a.sampled {
		return
	}
	rejected := a.drafts - a.accepted
	r.nct -= rejected
	if e.cfg.Async {
		r.ph -= rejected + 1 + a.accepted
	}
	e.stats.Rejected += uint64(rejected)
	e.stats.Accepted += uint64(a.accepted)
	if r.nt += 1 + a.accepted; r.nt >= r.last() {
		r.nt = r.last()
		e.finish(r)
	}
}

// finish ends a request that has its answer. It saves what was computed and not saved yet: all but
// the last token, which was never fed, and the extra step that async scheduling may have in flight.
func (e *Engine) finish(r *request) {
	n := min(r.settled(), r.nt-1, r.confirmed)
	r.saveFrom = 0
	e.save(r, n)
	e.publish(r, n)
	e.checkAll(r)
	e.running = remove(e.running, r)
	e.end(r, false)
}

// end releases everything and reports the outcome.
func (e *Engine) end(r *request, aborted bool) {
	e.forgetAnswer(r)
	e.reset(r)
	r.state = stateOver
	if r.Abort.When != Never {
		e.aborting--
	}
	e.outcomes = append(e.outcomes, Outcome{
		ID: r.ID, Own: r.own, Pool: r.pool, Output: r.nt - r.prompt, Aborted: aborted, Preempted: r.preempted})
	r.truth, r.trueHashes = nil, nil
}

// checkAll compares every block of a request, as far as steps that have ended wrote it, with the
// expected content. This finds a late copy: a cancel without a fence, a load that did not wait for
// the step in flight.
func (e *Engine) checkAll(r *request) {
	for g := range r.tables {
		e.check(r, g, 0, r.confirmed)
	}
}

// abort ends the requests whose client disconnects now, whatever they are doing.
func (e *Engine) abort() {
	if e.aborting == 0 {
		return
	}
	for _, q := range [][]*request{e.waiting, e.loading, e.running} {
		for i := len(q) - 1; i >= 0; i-- {
			if r := q[i]; r.goesAway() {
				e.abortOne(r)
			}
		}
	}
}

func (r *request) goesAway() bool {
	switch r.Abort.When {
	case Waiting:
		if r.state == stateWaiting && r.asked != nil {
			return true
		}
	case Loading:
		if r.state == stateLoading {
			return true
		}
	case Saving:
		if r.state == stateRunning && r.saving > 0 {
			return true
		}
	case Never:
		return false
	}
	return r.state == stateRunning && r.nt-r.prompt >= r.Abort.Output
}

// abortOne ends one request. A step in flight may still compute its blocks, and copies may still
// touch them: the first are ordered before any other use, the second hold pins of their own.
func (e *Engine) abortOne(r *request) {
	switch r.state {
	case stateLoading:
		e.giveUp(r)
		e.loading = remove(e.loading, r)
	case stateRunning:
		e.checkAll(r)
		e.running = remove(e.running, r)
	default:
		e.waiting = remove(e.waiting, r)
	}
	e.end(r, true)
}
