package mockengine

// Statuses of the session protocol that an engine acts on.
const (
	statusOK     = 0
	statusExists = 1
	statusBusy   = 3
)

// saveRetry is how many steps a request waits before it tries again what was busy.
const saveRetry = 16

// save submits the full blocks of the first n tokens that no save has yet, naming the last step,
// which, or one before it, computes them. n is settled(r) or less. Blocks that the agent just
// delivered are left out; the agent reports what else is stored already. If it is busy the cursor
// stays, and a later step tries again.
func (e *Engine) save(r *request, n int) {
	if r.SkipSave || e.step < r.saveFrom || !e.savable(r, n) {
		return
	}
	j := &job{Job: Job{Kind: SaveJob}, r: r, resets: r.resets}
	for g := range r.tables {
		size := e.blockTokens(g)
		at, ready := r.cursor[g], n/size
		from, to := r.fetched[0]/size, r.fetched[1]/size
		if from == to {
			from = ready
		}
		if end := min(from, ready); at < end {
			e.section(j, r, g, at, end)
		}
		if at = max(at, from, to); at < ready {
			e.section(j, r, g, at, ready)
		}
	}
	if len(j.Sections) > 0 && !e.submitSave(j) {
		e.stats.SavesBusy++
		r.saveFrom = e.step + saveRetry
		return
	}
	for g := range r.tables {
		r.cursor[g] = max(r.cursor[g], n/e.blockTokens(g))
	}
}

// savable reports whether a group has a full block after its cursor.
func (e *Engine) savable(r *request, n int) bool {
	for g := range r.tables {
		if n/e.blockTokens(g) > r.cursor[g] {
			return true
		}
	}
	return false
}

func (e *Engine) submitSave(j *job) bool {
	n := len(e.words)
	if n == 0 {
		return false
	}
	j.Revoke = e.words[n-1]
	e.words = e.words[:n-1]
	if !e.submit(j) {
		e.words = append(e.words, j.Revoke)
		return false
	}
	e.stats.SaveJobs++
	e.jobs.saves++
	e.jobs.order = append(e.jobs.order, j)
	j.r.saving++
	return true
}

// saveOver handles a save that has ended. Only now its revocation word may be reused.
func (e *Engine) saveOver(j *job, ev Event) {
	e.workers.clearRevoke(j.Revoke)
	e.words = append(e.words, j.Revoke)
	e.jobs.saves--
	j.r.saving--
	if !j.unpinned {
		e.unpin(j)
	}
	e.stats.BytesSaved += uint64(ev.Moved) * uint64(e.cfg.BlockBytes)
	for i, s := range ev.Status {
		countStatus(&e.stats.SaveStatus, s)
		if s == statusOK {
			e.stats.BlocksSaved++
		}
		if s == statusBusy {
			e.saveAgain(j, i)
		}
	}
	if ev.Status == nil {
		e.saveAgain(j, 0) // the agent is lost with all that it had
	}
	if len(e.jobs.order) > 2*e.jobs.saves+64 {
		e.clearOrder()
	}
}

// saveAgain sets the cursor of the request back to block i of the job, if it still has the blocks.
func (e *Engine) saveAgain(j *job, i int) {
	r := j.r
	if r.resets != j.resets || r.state != stateRunning {
		return
	}
	for k, section := range j.runs {
		n := len(j.Sections[k].Blocks)
		if i < n {
			r.cursor[section.group] = min(r.cursor[section.group], section.from+i)
			r.saveFrom = max(r.saveFrom, e.step+saveRetry)
		}
		i = max(i-n, 0)
	}
}

func (e *Engine) clearOrder() {
	live := e.jobs.order[:0]
	for _, j := range e.jobs.order {
		if e.jobs.byID[j.ID] == j {
			live = append(live, j)
		}
	}
	clear(e.jobs.order[len(live):])
	e.jobs.order = live
}

// revoke revokes a save: it sets the word first, so the agent will not commit, and then the blocks
// may be overwritten. The word stays taken until the job has ended.
func (e *Engine) revoke(j *job) {
	e.workers.revoke(j.Revoke)
	e.unpin(j)
	e.stats.SavesRevoked++
}

// revokeSaves revokes the saves of a request.
func (e *Engine) revokeSaves(r *request) {
	if r.saving == 0 {
		return
	}
	for _, j := range e.jobs.order {
		if j.r == r && !j.unpinned && e.jobs.byID[j.ID] == j {
			e.revoke(j)
		}
	}
}

// relieve revokes saves, oldest first, whose blocks have no other holder, until need blocks are
// free.
func (e *Engine) relieve(need int) bool {
	for _, j := range e.jobs.order {
		if e.pool.free >= need {
			break
		}
		if !j.unpinned && e.jobs.byID[j.ID] == j && e.holdsAlone(j) {
			e.revoke(j)
		}
	}
	return e.pool.free >= need
}

func (e *Engine) holdsAlone(j *job) bool {
	for _, s := range j.Sections {
		for _, id := range s.Blocks {
			if e.pool.blocks[id].refs == 1 {
				return true
			}
		}
	}
	return false
}
