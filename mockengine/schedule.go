package mockengine

// schedule makes one step: the running requests first, then the waiting ones, within the token
// budget. It launches the step and submits saves and loads to the agent. It returns nil if there
// was nothing to compute.
func (e *Engine) schedule() *launched {
	s := &launched{work: e.takeWork()}
	s.work.step = e.step + 1
	budget := e.cfg.StepTokens
	preempted := e.stats.Preemptions
	budget = e.scheduleRunning(s, budget)
	var loads []*request
	if e.stats.Preemptions == preempted {
		loads = e.admit(s, budget)
	}
	if len(s.entries) > 0 {
		if e.Trap != nil {
			s.work.hold = make(chan struct{})
		}
		e.step = s.work.step
		e.workers.launch(s.work)
	}
	jobs := e.jobs.next
	for i := range s.entries {
		e.save(s.entries[i].r, s.entries[i].r.settled())
	}
	for _, r := range loads {
		e.startLoad(r)
	}
	if s.work.hold != nil {
		if e.Trap != nil && e.jobs.next > jobs {
			e.Trap()
		}
		close(s.work.hold)
	}
	if len(s.entries) == 0 {
		e.idle = append(e.idle, s.work)
		return nil
	}
	return s
}

func (e *Engine) takeWork() *work {
	if n := len(e.idle); n > 0 {
		k := e.idle[n-1]
		e.idle = e.idle[:n-1]
		k.pieces, k.bases, k.hold = k.pieces[:0], k.bases[:0], nil
		return k
	}
	return new(work)
}

// scheduleRunning gives each running request its tokens, in order of admission. If blocks run out
// the last request is preempted.
func (e *Engine) scheduleRunning(s *launched, budget int) int {
	for i := 0; i < len(e.running) && budget > 0; i++ {
		r := e.running[i]
		n := min(r.nt+r.ph-r.nct, budget) // known ones that are not computed, and what comes out before
		if n <= 0 {
			continue
		}
		fits := e.allocate(r, r.nct+n)
		for !fits {
			last := e.running[len(e.running)-1]
			e.preempt(last)
			if last == r {
				return budget
			}
			fits = e.allocate(r, r.nct+n)
		}
		e.enter(s, r, n)
		budget -= n
	}
	return budget
}

// enter puts n tokens of a request into a step.
func (e *Engine) enter(s *launched, r *request, n int) {
	a := entry{r: r, resets: r.resets, sampled: r.nct+n >= r.nt+r.ph, end: r.nct + n}
	e.write(s.work, r, r.nct, r.truth[r.nct:a.end])
	r.nct = a.end
	if a.sampled {
		r.ph++
	}
	e.publish(r, r.settled())
	s.entries = append(s.entries, a)
	s.tokens += n
}

// publish makes the full blocks of the first n tokens findable. vLLM does so when it schedules the
// step that computes them: a request that finds one in the same step, or the next, runs after it on
// the same stream.
func (e *Engine) publish(r *request, n int) {
	for g, table := range r.tables {
		for b := min(n/e.cfg.blockTokens(g), len(table)) - 1; b >= 0; b-- {
			if e.pool.blocks[table[b]].published {
				break
			}
			e.pool.publish(table[b], e.key(r, g, b))
		}
	}
}

// allocate makes sure that a request has blocks for that many tokens: all that are missing, or
// none.
func (e *Engine) allocate(r *request, tokens int) bool {
	need := 0
	for g := range r.tables {
		need += max(ceilDiv(tokens, e.cfg.blockTokens(g))-len(r.tables[g]), 0)
	}
	if need > e.pool.free && !e.relieve(need) {
		return false
	}
	for g := range r.tables {
		for len(r.tables[g]) < ceilDiv(tokens, e.cfg.blockTokens(g)) {
			id, _ := e.pool.take()
			r.tables[g] = append(r.tables[g], id)
		}
	}
	return true
}

// preempt takes a running request's blocks away; it starts over, with the tokens it has.
func (e *Engine) preempt(r *request) {
	e.stats.Preemptions++
	e.checkAll(r)
	e.revokeSaves(r)
	e.running = remove(e.running, r)
	e.reset(r)
	e.waiting = insert(e.waiting, r)
}

// drop returns all blocks, last first.
func (e *Engine) drop(r *request) {
	for g, table := range r.tables {
		for b := len(table) - 1; b >= 0; b-- {
			e.pool.unref(table[b])
		}
		r.tables[g] = nil
	}
}

// reset returns all blocks and forgets what was computed. Steps in flight may still write to them;
// the next user of the blocks is ordered after them: the stream's steps are, and a load names the
// step.
func (e *Engine) reset(r *request) {
	e.drop(r)
	clear(r.cursor)
	clear(r.tails)
	r.nct, r.ph, r.confirmed = 0, 0, 0
	r.fetched = [2]int{}
	r.resets++
	r.need = 0
	r.state = stateWaiting
}

// update waits for a step and takes its output: tokens become known, requests end.
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
	r.confirmed = a.end
	if !a.sampled {
		return
	}
	r.ph--
	if r.nt++; r.nt >= r.prompt+r.Output {
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
		ID: r.ID, Own: r.own, Pool: r.pool, Output: r.nt - r.prompt, Aborted: aborted})
	r.truth, r.hashes = nil, nil
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
