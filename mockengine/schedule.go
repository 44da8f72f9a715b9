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
		e.stats.Steps++
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
		n := min(e.want(r), budget)
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

// want returns how many tokens a request could use in this step: known ones that are not computed,
// the placeholder after them, and drafts once it has begun to answer.
func (e *Engine) want(r *request) int {
	n := r.nt + r.ph - r.nct
	if r.specOn {
		n += e.cfg.Drafts
	}
	return n
}

// enter puts n tokens of a request into a step.
func (e *Engine) enter(s *launched, r *request, n int) {
	a := entry{r: r, resets: r.resets}
	a.drafts = max(r.nct+n-r.nt-r.ph, 0)
	a.sampled = r.nct+n >= r.nt+r.ph
	for a.accepted < a.drafts && e.accepts(r, r.pos+a.accepted) {
		a.accepted++
	}
	right := n - a.drafts + a.accepted
	e.write(s.work, r, r.pos, r.truth[r.pos:r.pos+right], true)
	if bad := a.drafts - a.accepted; bad > 0 {
		drafts := make([]uint32, bad)
		for i := range drafts {
			drafts[i] = ^r.truth[r.pos+right+i]
		}
		e.write(s.work, r, r.pos+right, drafts, false)
	}
	r.pos += right
	a.pos = r.pos
	r.nct += n
	if a.sampled {
		r.specOn = true
		if e.cfg.Async {
			r.ph += 1 + a.drafts
		}
	}
	e.publish(r, r.settled())
	s.entries = append(s.entries, a)
	s.tokens += n
}

// accepts reports whether the draft after position pos is the model's token. It depends on the
// request and the position alone, so that a request that runs again gives the same answer.
func (e *Engine) accepts(r *request, pos int) bool {
	return float64(mix(r.ID^mix(uint64(pos)))>>11)/(1<<53) < e.cfg.AcceptRate
}

// publish makes the full blocks of the first n tokens findable. vLLM does so when it schedules the
// step that computes them: a request that finds one in the same step, or the next, runs after it on
// the same stream.
func (e *Engine) publish(r *request, n int) {
	for g, table := range r.tables {
		for b := min(n/e.blockTokens(g), len(table)) - 1; b >= 0; b-- {
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
		need += max(ceilDiv(tokens, e.blockTokens(g))-len(r.tables[g]), 0)
	}
	if need > e.pool.free && !e.relieve(need) {
		return false
	}
	for g := range r.tables {
		for len(r.tables[g]) < ceilDiv(tokens, e.blockTokens(g)) {
			id, _ := e.pool.take()
			r.tables[g] = append(r.tables[g], id)
		}
	}
	return true
}

// preempt takes a running request's blocks away; it starts over, with the tokens it has.
func (e *Engine) preempt(r *request) {
	e.stats.Preemptions++
	r.preempted++
	e.checkAll(r)
	e.revokeSaves(r)
	e.running = remove(e.running, r)
	e.reset(r)
	e.waiting = insert(e.waiting, r)
}

// reset returns all blocks, last first, and forgets what was computed. Steps in flight may still
// write to them; the next user of the blocks is ordered after them: the stream's steps are, and a
// load names the step.
func (e *Engine) reset(r *request) {
	for g, table := range r.tables {
		for b := len(table) - 1; b >= 0; b-- {
			e.pool.unref(table[b])
		}
		r.tables[g] = nil
		r.cursor[g] = 0
		r.tails[g] = tail{}
	}
	r.nct, r.ph, r.pos, r.confirmed = 0, 0, 0, 0
	r.fetched = [2]int{}
	r.specOn = false
	r.resets++
	r.need = 0
	r.state = stateWaiting
}
