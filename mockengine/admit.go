package mockengine

import "time"

// admit takes waiting requests in order until budget, seats or blocks run out. Each looks in the
// engine's own cache, then asks the agent, and either starts to compute or waits for a load. It
// returns the requests that start to load.
func (e *Engine) admit(s *launched, budget int) (loads []*request) {
	for len(e.waiting) > 0 && budget > 0 && len(e.running) < e.cfg.MaxRunning {
		r := e.next()
		if r.need > e.pool.free && len(e.running) > 0 {
			return loads
		}
		load, ok := e.place(r)
		if !ok {
			return loads
		}
		if load {
			e.waiting = remove(e.waiting, r)
			r.state = stateLoading
			e.loading = append(e.loading, r)
			loads = append(loads, r)
			continue
		}
		n := min(r.nt-r.nct, budget)
		if !e.allocate(r, r.nct+n) {
			e.unstall(r)
			return loads
		}
		e.waiting = remove(e.waiting, r)
		r.state, r.need = stateRunning, 0
		e.count(r)
		e.running = insert(e.running, r)
		e.enter(s, r, n)
		budget -= n
	}
	return loads
}

// place gives a request the blocks that exist already: its own cached ones, or a load's
// destination. load reports that it has to wait for the agent; ok is false if there is no room, and
// then it has no blocks. A loaded request has its blocks.
func (e *Engine) place(r *request) (load, ok bool) {
	if r.state == stateLoaded {
		return false, true
	}
	own := e.match(r)
	tokens, pending := e.ask(r, own)
	if pending {
		return false, false // it is considered again in a later step
	}
	total := max(own, tokens)
	e.adopt(r, own)
	missing := e.cfg.BlocksFor(r.nt) - held(r)
	if total > own {
		// A load cannot be preempted: it is admitted only if the whole prompt fits with what other
		// loads will need.
		if missing+e.reserved() <= e.pool.free {
			e.allocate(r, total)
			r.nct, r.fetched = total, [2]int{own, total}
			return true, true
		}
		if len(e.running)+len(e.loading) > 0 {
			r.need = min(missing+e.reserved(), e.cfg.Blocks)
			e.drop(r)
			return false, false
		}
	}
	first := min(e.cfg.BlocksFor(own+min(r.nt-own, e.cfg.StepTokens))-held(r), missing)
	if first > e.pool.free && !e.relieve(first) {
		r.need = first
		e.drop(r)
		return false, false
	}
	e.forgetAnswer(r)
	r.nct = own
	return false, true
}

// match returns the longest prefix in the engine's own cache, whole in every group, that leaves a
// token to compute.
func (e *Engine) match(r *request) int {
	align := e.cfg.align()
	n := (r.nt - 1) / align * align
	for g := range e.cfg.Groups {
		size, b := e.cfg.blockTokens(g), 0
		for (b+1)*size <= n {
			if _, ok := e.pool.find(e.key(r, g, b)); !ok {
				break
			}
			b++
		}
		n = min(n, b*size) / align * align
	}
	return n
}

// adopt takes the own cached blocks of the first n tokens.
func (e *Engine) adopt(r *request, n int) {
	for g := range e.cfg.Groups {
		for b := range n / e.cfg.blockTokens(g) {
			id, _ := e.pool.find(e.key(r, g, b))
			e.pool.ref(id)
			r.tables[g] = append(r.tables[g], id)
		}
	}
}

// ask returns how many tokens the agent has, from the first on. It asks once while a request cannot
// be admitted, because a waiting request is considered in every step, and again if the engine's own
// part has shrunk since, because the lease begins after it. pending reports that lower tiers are
// still being asked: the request waits, but no longer than pendingWait, because an agent might say
// so for ever.
func (e *Engine) ask(r *request, own int) (tokens int, pending bool) {
	if r.noLoad {
		return 0, false
	}
	if r.asked != nil && own >= r.asked.own {
		return r.asked.tokens, false
	}
	e.forgetAnswer(r)
	hashes := e.prompt(r)
	if n := (r.nt - 1) / e.cfg.align() * e.cfg.align(); n <= own || len(hashes) == 0 {
		return 0, false // nothing left that could be loaded
	}
	start := e.now()
	a := e.agent.Ask(&Question{Hashes: hashes, Tokens: r.nt, Own: own})
	if a.Failed {
		e.stats.LookupMisses++
	} else {
		e.stats.LookupTimes.Record(e.now().Sub(start))
	}
	if a.Pending {
		if r.pending.IsZero() {
			r.pending = start
		}
		if start.Sub(r.pending) < pendingWait {
			e.release(a.Lease)
			return 0, true
		}
	}
	r.pending = time.Time{}
	r.asked = &asked{own: own, tokens: e.usable(r, a.Tokens), lease: a.Lease}
	return r.asked.tokens, false
}

// usable cuts an answer to whole blocks of every group, before the last token. It is the engine's
// own rule, whatever the agent says.
func (e *Engine) usable(r *request, tokens int) int {
	return min(tokens, r.nt-1) / e.cfg.align() * e.cfg.align()
}

// forgetAnswer drops a look-up's answer and releases its lease.
func (e *Engine) forgetAnswer(r *request) {
	if r.asked != nil {
		e.release(r.asked.lease)
	}
	r.asked = nil
}

// count records once, at the first admission, where a request's prompt came from.
func (e *Engine) count(r *request) {
	if r.counted {
		return
	}
	r.counted = true
	n := e.cfg.BlockTokens
	r.pool = (r.fetched[1] - r.fetched[0]) / n
	r.own = r.nct/n - r.pool
}

// reserved returns the blocks that requests with loads will still need to compute their prompts.
func (e *Engine) reserved() (n int) {
	for _, q := range [][]*request{e.loading, e.waiting} {
		for _, r := range q {
			if r.state == stateLoading || r.state == stateLoaded {
				n += e.cfg.BlocksFor(r.nt) - held(r)
			}
		}
	}
	return n
}

func held(r *request) (n int) {
	for _, t := range r.tables {
		n += len(t)
	}
	return n
}

// next returns the request that is admitted next: those with loaded blocks first, as in vLLM,
// because they keep them.
func (e *Engine) next() *request {
	for _, r := range e.waiting {
		if r.state == stateLoaded {
			return r
		}
	}
	return e.waiting[0]
}

// unstall makes room for a loaded request that finds none though nothing runs: the last loaded one
// starts over.
func (e *Engine) unstall(r *request) {
	if r.state != stateLoaded {
		panic("a request that fitted found no room")
	}
	if len(e.running)+len(e.loading)+len(e.inflight) > 0 {
		return
	}
	for i := len(e.waiting) - 1; i >= 0; i-- {
		if o := e.waiting[i]; o.state == stateLoaded {
			e.reset(o)
			return
		}
	}
}
