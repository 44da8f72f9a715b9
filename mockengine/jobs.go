package mockengine

import (
	"slices"
	"time"
)

// Statuses of the session protocol that an engine acts on.
const (
	statusOK     = 0
	statusExists = 1
	statusBusy   = 3
)

// saveRetry is how many steps a request waits before it tries again what was busy.
const saveRetry = 16

// job is one save or load that the agent has.
type job struct {
	Job
	r        *request
	resets   int
	unpinned bool // save: revoked; its pins were dropped already
	lost     bool // load: abandoned; no request waits for it
	deadline time.Time
}

// jobs holds the jobs in flight.
type jobs struct {
	byID  map[uint64]*job
	saves []*job // oldest first
	next  uint64
}

func newJobs() jobs { return jobs{byID: make(map[uint64]*job)} }

// section appends blocks from to to-1 of a group.
func (e *Engine) section(j *job, r *request, g, from, to int) {
	s := Section{Group: uint8(g), Blocks: slices.Clone(r.tables[g][from:to]), from: from}
	if from > 0 {
		k := e.key(r, g, from-1)
		s.Parent = append(s.Parent, k.hash[:]...)
	}
	for b := from; b < to; b++ {
		k := e.key(r, g, b)
		s.Hashes = append(s.Hashes, k.hash[:]...)
	}
	j.Sections = append(j.Sections, s)
}

// submit submits a job and pins its blocks until the agent reports it, whatever happens to the
// request.
func (e *Engine) submit(j *job) bool {
	e.jobs.next++
	j.ID = e.jobs.next
	j.Step, j.Event = e.step, e.workers.event(e.step)
	if !e.agent.Submit(&j.Job) {
		return false
	}
	e.jobs.byID[j.ID] = j
	for _, s := range j.Sections {
		for _, id := range s.Blocks {
			e.pool.ref(id)
		}
	}
	if e.OnSubmit != nil {
		e.OnSubmit()
	}
	return true
}

// unpin drops a job's pins, last block first.
func (e *Engine) unpin(j *job) {
	for i := len(j.Sections) - 1; i >= 0; i-- {
		for k := len(j.Sections[i].Blocks) - 1; k >= 0; k-- {
			e.pool.unref(j.Sections[i].Blocks[k])
		}
	}
	j.unpinned = true
}

// over handles a finished job: its fence has come.
func (e *Engine) over(ev Event) {
	j := e.jobs.byID[ev.Job]
	if j == nil {
		return
	}
	delete(e.jobs.byID, ev.Job)
	if j.Kind == SaveJob {
		e.saveOver(j, ev)
	} else {
		e.loadOver(j, ev)
	}
}

// startLoad requests the blocks after the engine's own ones. The step it names may still write to
// them.
func (e *Engine) startLoad(r *request) {
	j := &job{Job: Job{Kind: LoadJob, Lease: r.asked.lease}, r: r, resets: r.resets}
	own, total := r.fetched[0], r.fetched[1]
	for g := range r.tables {
		e.section(j, r, g, own/e.cfg.blockTokens(g), total/e.cfg.blockTokens(g))
	}
	if !e.submit(j) {
		e.stats.LoadsFailed++
		e.backToWaiting(r)
		r.noLoad = true
		e.forgetAnswer(r)
		return
	}
	j.deadline = e.now().Add(loadDeadline)
	r.load = j
}

// loadOver checks every loaded byte before it is used, and lets the request continue after the last
// block of the unbroken prefix.
func (e *Engine) loadOver(j *job, ev Event) {
	r := j.r
	e.stats.BytesLoaded += uint64(ev.Moved) * uint64(e.cfg.BlockBytes)
	defer e.unpin(j)
	if j.lost || r.load != j {
		e.release(j.Lease)
		return
	}
	r.load = nil
	own := r.fetched[0]
	valid := e.arrived(j, ev)
	e.forgetAnswer(r)
	e.loading = remove(e.loading, r)
	if valid < r.fetched[1] {
		e.stats.LoadsFailed++
		r.noLoad = true // what failed once would fail again
	}
	if valid == 0 {
		e.reset(r)
	} else {
		r.nct = valid
		r.fetched = [2]int{own, max(valid, own)}
		e.publish(r, valid)
		r.state = stateLoaded
	}
	e.waiting = insert(e.waiting, r)
}

// arrived returns the number of leading tokens that are present in every group.
func (e *Engine) arrived(j *job, ev Event) int {
	r, n := j.r, j.r.fetched[1]
	for _, s := range j.Sections {
		g, size := int(s.Group), e.cfg.blockTokens(int(s.Group))
		for b := s.from; b < s.from+len(s.Blocks); b++ {
			if len(ev.Status) > 0 && ev.Status[0] == statusOK {
				e.check(r, g, b*size, (b+1)*size)
				e.stats.BlocksLoaded++
			} else {
				n = min(n, b*size)
			}
			ev.Status = ev.Status[min(1, len(ev.Status)):]
		}
	}
	return n / e.cfg.align() * e.cfg.align()
}

// expire abandons loads that took too long. A deadline is no fence: the blocks stay pinned until
// one comes, and the request takes others and computes.
func (e *Engine) expire() {
	if len(e.loading) == 0 {
		return
	}
	now := e.now()
	for i := len(e.loading) - 1; i >= 0; i-- {
		r := e.loading[i]
		if r.load == nil || now.Before(r.load.deadline) {
			continue
		}
		e.stats.LoadsLate++
		e.stats.LoadsFailed++
		e.giveUp(r)
		r.noLoad = true
		e.backToWaiting(r)
	}
}

// giveUp cancels a load and abandons it; its lease ends with the job.
func (e *Engine) giveUp(r *request) {
	j := r.load
	if j == nil {
		return
	}
	r.load = nil
	r.asked = nil
	j.lost = true
	e.agent.Cancel(j.ID)
}

func (e *Engine) backToWaiting(r *request) {
	e.loading = remove(e.loading, r)
	e.reset(r)
	e.waiting = insert(e.waiting, r)
}

func (e *Engine) release(l Lease) {
	if l != (Lease{}) {
		e.agent.Release(l)
	}
}

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
		size := e.cfg.blockTokens(g)
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
		r.cursor[g] = max(r.cursor[g], n/e.cfg.blockTokens(g))
	}
}

// savable reports whether a group has a full block after its cursor.
func (e *Engine) savable(r *request, n int) bool {
	for g := range r.tables {
		if n/e.cfg.blockTokens(g) > r.cursor[g] {
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
	e.jobs.saves = append(e.jobs.saves, j)
	j.r.saving++
	return true
}

// saveOver handles a save that has ended. Only now its revocation word may be reused.
func (e *Engine) saveOver(j *job, ev Event) {
	e.workers.clearRevoke(j.Revoke)
	e.words = append(e.words, j.Revoke)
	e.jobs.saves = slices.DeleteFunc(e.jobs.saves, func(o *job) bool { return o == j })
	j.r.saving--
	if !j.unpinned {
		e.unpin(j)
	}
	e.stats.BytesSaved += uint64(ev.Moved) * uint64(e.cfg.BlockBytes)
	for _, s := range ev.Status {
		if s == statusOK {
			e.stats.BlocksSaved++
		}
	}
	// An agent that is lost is lost with all that it had.
	if ev.Status == nil || slices.Contains(ev.Status, statusBusy) {
		e.saveAgain(j)
	}
}

// saveAgain sets the request's cursors back to the job's first blocks, if it still has the blocks.
func (e *Engine) saveAgain(j *job) {
	r := j.r
	if r.resets != j.resets || r.state != stateRunning {
		return
	}
	for _, s := range j.Sections {
		r.cursor[s.Group] = min(r.cursor[s.Group], s.from)
	}
	r.saveFrom = e.step + saveRetry
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
	for _, j := range e.jobs.saves {
		if j.r == r && !j.unpinned {
			e.revoke(j)
		}
	}
}

// relieve revokes saves, oldest first, whose blocks have no other holder, until need blocks are
// free.
func (e *Engine) relieve(need int) bool {
	for _, j := range e.jobs.saves {
		if e.pool.free >= need {
			break
		}
		if !j.unpinned && e.holdsAlone(j) {
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
