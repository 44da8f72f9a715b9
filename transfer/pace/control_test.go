package pace

import (
	"slices"
	"testing"
	"time"
)

const (
	tick    = 100 * time.Microsecond // of the simulation
	report  = 8                      // steps that an engine reports together
	batch   = 8 << 20                // bytes of a save's batch
	flooded = batch * 900            // bytes per second that copies have without a limit
)

// world simulates an engine that decodes beside saves without an end: while a copy runs, its steps
// take slow times as long.
type world struct {
	*clocked
	engine *Engine
	base   time.Duration // of a step without copies
	slow   float64
	jitter func(step int) float64 // what a step takes, in steps; nil: 1
	idle   bool                   // the engine does not decode
	quiet  bool                   // there are no saves

	turn    *Turn
	copying bool
	until   time.Time // of the copy
	moved   int64
	ended   []Step // not reported yet
	took    []time.Duration
	begin   time.Time // of the current step
	done    float64   // of it
	longest time.Duration
	since   time.Time // the last copy ended
}

func newWorld(t *testing.T, base time.Duration, slow float64) *world {
	w := &world{clocked: newClocked(t, Auto), base: base, slow: slow}
	w.engine = w.Engine()
	w.begin, w.since = w.now, w.now
	return w
}

// run lets time pass, and returns the steps' times and the rate of the copies.
func (w *world) run(d time.Duration) (took []time.Duration, rate float64) {
	w.took, w.moved, w.longest = nil, 0, 0
	for end := w.now.Add(d); w.now.Before(end); w.now = w.now.Add(tick) {
		w.copy()
		w.compute()
	}
	return w.took, float64(w.moved) / d.Seconds()
}

func (w *world) copy() {
	if w.copying && !w.now.Before(w.until) {
		w.Ended(Save)
		w.copying, w.since = false, w.now
	}
	if w.copying || w.quiet {
		return
	}
	if w.turn == nil {
		w.turn = w.Enter(Save)
	}
	if w.turn.Delay() > 0 {
		return
	}
	w.turn.Leave()
	w.turn = nil
	w.longest = max(w.longest, w.now.Sub(w.since))
	n := w.Batch(batch)
	w.Begin(Save, n)
	w.moved += n
	w.copying, w.until = true, w.now.Add(time.Duration(float64(n)/(batch*1000)*float64(time.Second)))
}

func (w *world) compute() {
	if w.idle {
		w.begin, w.done = w.now, 0
		return
	}
	speed := 1.0
	if w.copying {
		speed = 1 / w.slow
	}
	w.done += speed * float64(tick) / float64(w.base)
	most := 1.0
	if w.jitter != nil {
		most = w.jitter(len(w.took))
	}
	if w.done < most {
		return
	}
	w.ended = append(w.ended, Step{Begin: w.begin, End: w.now, Requests: 4})
	w.took = append(w.took, w.now.Sub(w.begin))
	w.begin, w.done = w.now, 0
	if len(w.ended) == report {
		w.engine.Steps(w.ended)
		w.ended = w.ended[:0]
	}
}

func p99(v []time.Duration) time.Duration {
	slices.Sort(v)
	return v[len(v)*99/100]
}

// TestHarmIsLimited expects a flood that doubles decode steps to be slowed until its harm is small,
// and no further than that.
func TestHarmIsLimited(t *testing.T) {
	const base = 20 * time.Millisecond
	w := newWorld(t, base, 2)
	w.quiet = true
	w.run(time.Second)
	w.quiet = false
	w.run(6 * time.Second)
	took, rate := w.run(15 * time.Second)
	r := w.Report()
	t.Logf("p99 %v, %.0f %% of the rate without a limit; %+v", p99(took), 100*rate/flooded, r)
	if p99(took) > base*3/2 {
		t.Errorf("steps of %v take %v (p99) beside saves", base, p99(took))
	}
	// Copies that double a step while they run make it a third longer in a third of the time.
	if share := rate / flooded; share < 0.15 || share > 0.5 {
		t.Errorf("saves have %.2f of their rate", share)
	}
	if r.Counts.Cuts == 0 || r.Slowdown == 0 {
		t.Errorf("reported: %+v", r)
	}
}

// TestNoHarmNoLimit expects saves that harm no step to go at full speed, even if steps vary, and
// hardly ever to be held for a measurement.
func TestNoHarmNoLimit(t *testing.T) {
	w := newWorld(t, 10*time.Millisecond, 1)
	w.jitter = func(step int) float64 { return 1 + float64(step*7919%10)/100 }
	if _, rate := w.run(30 * time.Second); rate < 0.95*flooded {
		t.Errorf("saves have %.2f of their rate; %+v", rate/flooded, w.Report())
	}
	if r := w.Report(); r.Counts.Cuts > 0 || r.Rate > 0 || r.Counts.Holds == 0 || r.Counts.Holds > 4 {
		t.Errorf("reported: %+v", r)
	}
}

// TestSavesStayAlive expects the rate not to fall below its floor, whatever it does to steps, and
// no save to wait without end.
func TestSavesStayAlive(t *testing.T) {
	const step = 20 * time.Millisecond
	p := newClocked(t, Auto)
	e := p.Engine()
	least := MaxRate
	for range 40 {
		p.steps(e, minAlone, step, 4)
		p.beside(e, Save, proofs*besideSteps, 3*step, 4)
		p.steps(e, 1, step, 4)
		least = min(least, p.Report().Rate)
	}
	if r := p.Report(); least < leastRate || least > 4*leastRate || r.Counts.Cuts < 10 {
		t.Errorf("a rate of %d bytes per second is below the floor, or far from it: %+v", least, r)
	}
	turn := p.Enter(Save)
	p.await(turn)
	turn.Leave()

	w := newWorld(t, step, 50)
	w.run(20 * time.Second)
	if _, rate := w.run(10 * time.Second); rate < floorAt*flooded || w.longest > 2*holdMost {
		t.Errorf("saves have %.0f MiB/s, and waited up to %v; %+v", rate/(1<<20), w.longest, w.Report())
	}
}

// TestLimitEndsWithItsReason expects the limit not to hold while no engine decodes, and to be
// raised when copies do no harm any more.
func TestLimitEndsWithItsReason(t *testing.T) {
	w := newWorld(t, 20*time.Millisecond, 3)
	w.run(10 * time.Second)
	if w.Report().Rate == 0 {
		t.Fatal("harm without a limit")
	}
	w.idle = true
	w.run(2 * quietLeast)
	if _, rate := w.run(time.Second); rate < 0.95*flooded {
		t.Errorf("saves have %.2f of their rate while no engine decodes", rate/flooded)
	}
	w.idle, w.slow = false, 1
	w.run(15 * time.Second)
	if _, rate := w.run(5 * time.Second); rate < 0.9*flooded {
		t.Errorf("saves have %.2f of their rate after they do no harm; %+v", rate/flooded, w.Report())
	}
}

// steps reports n steps of a time, one after the other.
func (c *clocked) steps(e *Engine, n int, took time.Duration, requests uint32) {
	for range n {
		begin := c.now
		c.now = c.now.Add(took)
		e.Steps([]Step{{begin, c.now, requests}})
	}
}

// beside reports steps during one long copy.
func (c *clocked) beside(e *Engine, u Urgency, n int, took time.Duration, requests uint32) {
	c.Begin(u, 1<<30)
	c.now = c.now.Add(time.Millisecond)
	c.steps(e, n, took, requests)
	c.Ended(u)
	c.now = c.now.Add(10 * time.Millisecond)
}

// TestLimitOutlivesNoLongStep expects a limit not to hold for long after a long step, nor at all
// because of one that no decoding takes, nor longer because of an older one of another engine.
func TestLimitOutlivesNoLongStep(t *testing.T) {
	const step = 20 * time.Millisecond
	p := newClocked(t, Auto)
	e, other := p.Engine(), p.Engine()
	p.steps(e, minAlone, step, 4)
	p.beside(e, Save, proofs*besideSteps, 3*step, 4)
	limited := func(want bool, what string) {
		t.Helper()
		if r := p.Report(); (r.Rate > 0) != want {
			t.Errorf("%s: the limit is %d bytes per second", what, r.Rate)
		}
	}
	limited(true, "harm")
	before := p.Report().Counts
	p.steps(e, 1, 20*time.Minute, 4)
	limited(false, "a step of 20 minutes")
	if p.Report().Counts != before {
		t.Errorf("a step of 20 minutes is counted: %+v", p.Report().Counts)
	}
	p.steps(e, 1, longestStep, 4)
	limited(true, "the longest step")
	p.now = p.now.Add(quietMost)
	limited(false, "long after the longest step")
	p.steps(e, 1, step, 4)
	other.Steps([]Step{{p.now.Add(-longestStep), p.now.Add(-step), 4}})
	p.now = p.now.Add(quietLeast)
	limited(false, "an older step of another engine")
}

// TestOnlyLikeStepsAreCompared expects no cut because steps of more requests take longer, nor
// because steps are slow beside loads, nor because an old comparison no longer holds.
func TestOnlyLikeStepsAreCompared(t *testing.T) {
	const fast, slow = 10 * time.Millisecond, 30 * time.Millisecond
	p := newClocked(t, Auto)
	e := p.Engine()
	p.steps(e, 2*aloneSteps, fast, 4)
	p.beside(e, Save, proofs*besideSteps, slow, 64)
	if r := p.Report(); r.Counts.Cuts != 0 || r.Slowdown != 0 {
		t.Fatalf("steps of 64 requests were compared with those of 4: %+v", r)
	}
	p.beside(e, Urgent, 4*besideSteps, slow, 4)
	if r := p.Report(); r.Counts.Cuts != 0 || r.Counts.Other != 4*besideSteps {
		t.Fatalf("steps beside loads were compared: %+v", r)
	}
	p.steps(e, 2*freshSteps, fast, 1) // of another kind: those of 4 requests grow old
	p.beside(e, Save, proofs*besideSteps, slow, 4)
	if r := p.Report(); r.Counts.Cuts != 0 || r.Counts.Holds == 0 {
		t.Fatalf("old steps without copies led to a cut: %+v", r)
	}
	p.steps(e, minAlone, slow, 4) // it is the engine that became slower
	p.beside(e, Save, proofs*besideSteps, slow, 4)
	if r := p.Report(); r.Counts.Cuts != 0 {
		t.Fatalf("reported: %+v", r)
	}
	p.beside(e, Save, besideSteps, 2*slow, 4)
	if r := p.Report(); r.Counts.Cuts != 0 {
		t.Fatalf("one comparison led to a cut: %+v", r)
	}
	p.beside(e, Save, besideSteps, 2*slow, 4)
	if r := p.Report(); r.Counts.Cuts != 1 {
		t.Fatalf("harm without a cut: %+v", r)
	}
}

// TestHoldEndsWhenItHasMeasured expects a pause to end with the steps that it was for, and in any
// case in time.
func TestHoldEndsWhenItHasMeasured(t *testing.T) {
	const step = 10 * time.Millisecond
	p := newClocked(t, Auto)
	e := p.Engine()
	p.beside(e, Save, besideSteps, step, 4)
	turn := p.Enter(Save)
	defer turn.Leave()
	p.ready(turn, false, "a flood of which no step alone was seen")
	p.steps(e, minAlone-1, step, 4)
	p.ready(turn, false, "there are too few steps alone")
	p.steps(e, 1, step, 4)
	p.ready(turn, true, "there are enough steps alone")

	p.steps(e, oldestSteps+holdEvery, step, 1)
	p.beside(e, Save, besideSteps, step, 4)
	p.ready(turn, false, "the steps alone are too old")
	if waited := p.await(turn); waited > holdMost {
		t.Errorf("held for %v", waited)
	}
}
