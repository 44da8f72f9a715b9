package pace

import (
	"testing"
	"time"
)

// clocked is a pacer on a clock that the test moves.
type clocked struct {
	*Pacer
	t   *testing.T
	now time.Time
}

func newClocked(t *testing.T, setting int64) *clocked {
	c := &clocked{t: t, now: time.Unix(1000, 0)}
	c.Pacer = New(setting, func() time.Time { return c.now })
	return c
}

// copied begins a copy at once, and ends it after a time.
func (c *clocked) copied(u Urgency, bytes int64, took time.Duration) {
	c.Begin(u, bytes)
	c.now = c.now.Add(took)
	c.Ended(u)
}

// ready wants a turn to be allowed, or not.
func (c *clocked) ready(t *Turn, want bool, what string) {
	c.t.Helper()
	if got := t.Delay() == 0; got != want {
		c.t.Fatalf("%s: ready %v, want %v", what, got, want)
	}
}

// await moves the clock until a turn is allowed, and returns how long that took.
func (c *clocked) await(t *Turn) (waited time.Duration) {
	c.t.Helper()
	for wait := t.Delay(); wait > 0; wait = t.Delay() {
		c.now, waited = c.now.Add(wait), waited+wait
		if waited > time.Minute {
			c.t.Fatal("no turn within a minute")
		}
	}
	return waited
}

// TestFixedRate expects copies to take their time of the budget on average, and none to wait
// without end after a large one.
func TestFixedRate(t *testing.T) {
	const rate = 100 << 20
	p := newClocked(t, rate)
	begin, moved := p.now, int64(0)
	for moved < rate {
		turn := p.Enter(Save)
		p.await(turn)
		turn.Leave()
		n := p.Batch(8 << 20)
		p.copied(Save, n, 100*time.Microsecond)
		moved += n
	}
	if took := p.now.Sub(begin); took < 970*time.Millisecond || took > 1010*time.Millisecond {
		t.Errorf("a second's bytes took %v", took)
	}
	p.copied(Save, 100*rate, time.Millisecond)
	turn := p.Enter(Save)
	defer turn.Leave()
	if waited := p.await(turn); waited > maxWait {
		t.Errorf("waited %v after one large copy, at most %v is allowed", waited, maxWait)
	}
	if r := p.Report(); r.Rate != rate || r.SaveWaitS == 0 {
		t.Errorf("reported: %+v", r)
	}
}

// TestUrgentCopiesNeverWait expects a load to begin at once however much saves owe, and to take
// nothing of their budget.
func TestUrgentCopiesNeverWait(t *testing.T) {
	p := newClocked(t, MinRate)
	p.copied(Save, 5*MinRate, time.Millisecond)
	load, save := p.Enter(Urgent), p.Enter(Save)
	defer load.Leave()
	defer save.Leave()
	p.ready(load, true, "a load waits for the budget")
	p.ready(save, false, "a save beyond the budget")
	before := p.await(save)
	p.copied(Save, 5*MinRate, time.Millisecond)
	p.copied(Urgent, 1<<40, 0)
	if after := p.await(save); after > before+2*lateness {
		t.Errorf("a save waits %v after a load, %v without one: the load took of the budget", after, before)
	}
}

// TestSavesGoBeforeTiers expects a copy to a tier to wait while a save does, but not for ever.
func TestSavesGoBeforeTiers(t *testing.T) {
	p := newClocked(t, 64<<20)
	behind, save := p.Enter(Behind), p.Enter(Save)
	defer behind.Leave()
	p.ready(behind, false, "a copy to a tier goes before a save that waits")
	p.ready(save, true, "a save within the budget")
	save.Leave()
	p.ready(behind, true, "a copy to a tier when no save waits")
	other := p.Enter(Save)
	defer other.Leave()
	p.ready(behind, false, "a copy to a tier goes before a save that waits")
	p.now = p.now.Add(behindAge)
	p.ready(behind, true, "a copy to a tier that has waited long")
}

// TestWithoutALimit expects nothing to wait without a reason: with pace off, with no pacer, with no
// decode step seen, and after End.
func TestWithoutALimit(t *testing.T) {
	off, auto, ended := newClocked(t, Off), newClocked(t, Auto), newClocked(t, MinRate)
	ended.copied(Save, 1<<30, 0)
	ended.End()
	for name, p := range map[string]*Pacer{"off": off.Pacer, "auto": auto.Pacer, "none": nil, "ended": ended.Pacer} {
		p.Begin(Save, 1<<40)
		p.Ended(Save)
		turn := p.Enter(Save)
		if wait := turn.Delay(); wait != 0 || !p.May() || p.Batch(8<<20) != 8<<20 {
			t.Errorf("%s: a save waits %v, batches of %d bytes", name, wait, p.Batch(8<<20))
		}
		turn.Leave()
		p.End()
	}
}

// TestSpans compares what is known of copies with a plain list of them.
func TestSpans(t *testing.T) {
	var s spans
	at := func(ms int) time.Time { return time.Unix(0, 0).Add(time.Duration(ms) * time.Millisecond) }
	s.begin(at(10))
	s.begin(at(12))
	s.end(at(14))
	s.end(at(20))
	s.begin(at(21)) // so soon that it is the same span
	s.end(at(22))
	s.begin(at(40))
	for _, c := range []struct {
		begin, end int
		want       bool
	}{{0, 10, false}, {0, 11, true}, {15, 16, true}, {20, 21, true}, {22, 40, false}, {22, 41, true}, {50, 60, true}} {
		if got := s.overlap(at(c.begin), at(c.end)); got != c.want {
			t.Errorf("copies between %d and %d ms: %v", c.begin, c.end, got)
		}
	}
	s.end(at(41))
	for i := range 3 * maxSpans {
		s.begin(at(100 + 10*i))
		s.end(at(105 + 10*i))
	}
	if len(s.ended) > 2*maxSpans {
		t.Errorf("%d spans are kept", len(s.ended))
	}
	if !s.overlap(at(60), at(61)) {
		t.Error("a time that is no longer known counts as one without copies")
	}
	last := 100 + 10*(3*maxSpans-1)
	if s.overlap(at(last+5), at(last+6)) || !s.overlap(at(last-10), at(last-9)) {
		t.Error("the latest copies are not known")
	}
}
