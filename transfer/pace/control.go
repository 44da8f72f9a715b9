package pace

import (
	"encoding/binary"
	"math/bits"
	"slices"
	"time"
)

// Constants of the controller.
const (
	harm     = 1.35 // a slowdown from which the rate is cut
	harmless = 1.25 // a slowdown below which it is raised
	proofs   = 2    // comparisons in a row that must show harm

	cutTo     = 0.75     // of the rate that did harm
	raiseBy   = 1.0 / 16 // of the rate that copies had without a limit
	floorAt   = 1.0 / 16 // of that rate: the lowest limit
	leastRate = 32 << 20 // bytes per second: the lowest limit however slow copies were

	besideSteps = 16   // steps beside copies that are compared at a time
	aloneSteps  = 16   // steps without copies that they are compared with, the latest
	minAlone    = 8    // fewer of them are not compared with
	freshSteps  = 256  // a rate is cut only on steps without copies that are at most so many steps old
	oldestSteps = 2048 // older ones are not compared with at all

	holdEvery = 256         // steps between two pauses to measure steps without copies
	holdSteps = 32          // longest pause, in steps
	holdMost  = time.Second // longest pause

	quietLeast  = time.Second          // an engine that has reported no step for so long does not decode,
	quietSteps  = 4                    // or for so many steps of the last length,
	quietMost   = 10 * time.Second     // but at most for so long
	longestStep = 10 * time.Second     // of a step; what took longer was no decoding: the engine was stopped
	edge        = 2 * time.Millisecond // by which the time of a step may be wrong

	meterEvery = 50 * time.Millisecond // least time over which a rate is measured
	classes    = 17                    // of steps: by the number of bits of the number of requests
)

// control is the state of the controller. Pacer.mu guards it.
type control struct {
	rate    float64   // bytes per second; 0: no limit
	peak    float64   // the rate that copies had without a limit when it was last cut
	changed time.Time // when the rate last changed: steps before it say nothing about the new one
	limited bool      // a copy has waited for the budget since then

	held   time.Time // until then no copy begins that gives way
	holder *window   // whose steps without copies are being measured

	slowdown float64       // as last compared
	decoded  time.Time     // when the last decode step ended
	quiet    time.Duration // after which no engine decodes

	metered time.Time // when bytes were last read
	bytes   int64
	meter   float64 // bytes per second between the last two readings
}

func (c *control) decoding(now time.Time) bool { return now.Sub(c.decoded) < c.quiet }

// Step is a decode step of an engine: one in which every request computes its next token.
type Step struct {
	Begin, End time.Time
	Requests   uint32
}

// stepBytes is a step of STEPS: the time from its end to the message and its own, microseconds, and
// its requests; 4 bytes each, little-endian.
const stepBytes = 12

// ParseSteps returns the steps of a STEPS that was sent now.
func ParseSteps(list []byte, now time.Time) []Step {
	micros := func(b []byte) time.Duration {
		return time.Duration(binary.LittleEndian.Uint32(b)) * time.Microsecond
	}
	out := make([]Step, 0, len(list)/stepBytes)
	for ; len(list) > 0; list = list[stepBytes:] {
		end := now.Add(-micros(list))
		requests := binary.LittleEndian.Uint32(list[8:])
		out = append(out, Step{Begin: end.Add(-micros(list[4:])), End: end, Requests: requests})
	}
	return out
}

// Engine is one engine worker, whose decode steps must not become slower. One goroutine at a time
// may use it.
type Engine struct {
	pacer *Pacer
	steps uint64 // decode steps so far
	held  uint64 // of them when copies were last held for this engine; 0: never
	kinds [classes]window
}

// window has the latest steps of one engine and kind: those with a like number of requests.
type window struct {
	alone  []sample // the oldest first
	beside []time.Duration
	first  uint64  // number of the first of those beside
	rate   float64 // of copies beside those steps: the highest
	harms  int     // comparisons in a row that showed harm
}

type sample struct {
	took time.Duration
	step uint64 // its number among the engine's
}

// Engine returns a new source of decode steps.
func (p *Pacer) Engine() *Engine { return &Engine{pacer: p} }

// Steps reports decode steps that have ended, oldest first. It ignores what is too long for one.
func (e *Engine) Steps(steps []Step) {
	p := e.pacer
	p.mu.Lock()
	defer p.mu.Unlock()
	c, now := &p.mu.control, p.now()
	p.meterLocked(now)
	for i := range steps {
		s := &steps[i]
		took := s.End.Sub(s.Begin)
		if s.Requests == 0 || took <= 0 || took > longestStep {
			continue
		}
		e.steps++
		if s.End.After(c.decoded) {
			c.decoded = s.End
			c.quiet = min(max(quietLeast, quietSteps*took), quietMost)
		}
		e.sortLocked(s, took, now)
	}
}

// sortLocked adds a step to those alone or those beside copies. It judges when there are enough.
func (e *Engine) sortLocked(s *Step, took time.Duration, now time.Time) {
	p := e.pacer
	c, w := &p.mu.control, &e.kinds[min(bits.Len32(s.Requests), classes-1)]
	giving, urgent := &p.mu.copies[0], &p.mu.copies[1]
	before, after := s.Begin.Add(-edge), s.End.Add(edge)
	switch {
	case urgent.overlap(before, after):
		p.mu.counts.Other++
	case !giving.overlap(before, after):
		p.mu.counts.Alone++
		if len(w.alone) == aloneSteps {
			w.alone = append(w.alone[:0], w.alone[1:]...)
		}
		w.alone = append(w.alone, sample{took, e.steps})
		if c.holder == w && len(e.alone(w, e.steps-e.held)) >= minAlone {
			c.held, c.holder = time.Time{}, nil
		}
	case giving.overlap(s.Begin, s.End) && s.Begin.After(c.changed):
		p.mu.counts.Beside++
		if len(w.beside) == 0 || e.steps-w.first >= freshSteps {
			w.beside, w.first, w.rate = w.beside[:0], e.steps, 0
		}
		w.beside, w.rate = append(w.beside, took), max(w.rate, c.meter)
		if len(w.beside) == besideSteps {
			p.judgeLocked(e, w, took, now)
			w.beside = w.beside[:0]
		}
	default:
		p.mu.counts.Other++
	}
}

// alone returns the times of those steps alone that are among the engine's last steps.
func (e *Engine) alone(w *window, steps uint64) (took []time.Duration) {
	for _, s := range w.alone {
		if e.steps-s.step < steps {
			took = append(took, s.took)
		}
	}
	return took
}

// judgeLocked compares the steps of a window and changes the rate. Without enough steps alone, or
// if harm rests on old ones, it has some measured instead.
func (p *Pacer) judgeLocked(e *Engine, w *window, took time.Duration, now time.Time) {
	c := &p.mu.control
	if p.setting != Auto {
		return
	}
	alone, fresh := e.alone(w, freshSteps), true
	if len(alone) < minAlone {
		alone, fresh = e.alone(w, oldestSteps), false
	}
	if len(alone) < minAlone {
		p.holdLocked(e, w, took, now)
		return
	}
	c.slowdown = float64(upper(w.beside)) / float64(upper(alone))
	if c.slowdown < harm {
		w.harms = 0
	} else if w.harms++; w.harms < proofs {
		return
	}
	switch {
	case w.harms > 0 && !fresh:
		p.holdLocked(e, w, took, now)
	case w.harms > 0:
		w.harms = 0
		c.cut(w.rate, now)
		p.mu.counts.Cuts++
	case c.slowdown < harmless && c.rate > 0 && c.limited:
		c.raise(now)
		p.mu.counts.Raises++
	}
}

// upper returns the largest of the values without the largest eighth of them. It sorts them.
func upper(v []time.Duration) time.Duration {
	slices.Sort(v)
	return v[len(v)-1-len(v)/8]
}

// cut lowers the rate below the one that was measured, at the lowest to the floor.
func (c *control) cut(measured float64, now time.Time) {
	if c.rate == 0 {
		c.peak = measured
	} else {
		measured = min(measured, c.rate)
	}
	c.rate = max(cutTo*measured, floorAt*c.peak, leastRate)
	c.changed, c.limited = now, false
}

// raise raises the rate by a share of what copies had without a limit, and lifts it there.
func (c *control) raise(now time.Time) {
	if c.rate += raiseBy * c.peak; c.rate >= c.peak {
		c.rate = 0
	}
	c.changed, c.limited = now, false
}

// holdLocked lets no copy begin that gives way until there are enough steps without copies, for a
// bounded time. It does nothing if copies were held for the engine not long ago.
func (p *Pacer) holdLocked(e *Engine, w *window, took time.Duration, now time.Time) {
	if c := &p.mu.control; e.held == 0 || e.steps-e.held >= holdEvery {
		e.held = e.steps
		c.held, c.holder = now.Add(min(holdMost, holdSteps*took)), w
		p.mu.counts.Holds++
	}
}

// meterLocked measures the rate of the copies that give way.
func (p *Pacer) meterLocked(now time.Time) {
	c := &p.mu.control
	if past := now.Sub(c.metered); past >= meterEvery {
		c.meter = float64(p.mu.moved-c.bytes) / past.Seconds()
		c.metered, c.bytes = now, p.mu.moved
	}
}
