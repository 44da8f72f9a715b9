package pooltest

import (
	"fmt"
	"slices"
	"time"
)

// Lag compares calls that have a deadline of Wait with bare waits beside them in the same process,
// which a busy machine delays too.
type Lag struct {
	Wait, Slack time.Duration
	bare        []time.Duration // by how much waits ended late, one for each call
	all         []time.Duration // and calls
	waited      []time.Duration // and those of them that waited until their deadline
}

// Call performs a bare wait and then a call, which returns whether it waited until its deadline.
func (l *Lag) Call(call func() (waited bool)) {
	start := time.Now()
	<-time.After(l.Wait)
	l.bare = append(l.bare, time.Since(start)-l.Wait)
	start = time.Now()
	waited := call()
	over := time.Since(start) - l.Wait
	l.all = append(l.all, over)
	if waited {
		l.waited = append(l.waited, over)
	}
}

// Err reports calls that waited too long: by more than Slack in the shortest that waited, or in
// more than a few of all, not counting as many as there were such bare waits.
func (l *Lag) Err(few int) error {
	if len(l.waited) == 0 {
		return fmt.Errorf("none of %d calls waited", len(l.all))
	}
	if best := slices.Min(l.waited); best > l.Slack {
		return fmt.Errorf("all of %d calls that waited were over their deadline, by %v at least", len(l.waited), best)
	}
	if late, bare := l.late(l.all), l.late(l.bare); late > few+bare {
		return fmt.Errorf(
			"%d of %d calls were over their deadline by more than %v, and %d bare waits", late, len(l.all), l.Slack,
			bare,
		)
	}
	return nil
}

// Worst returns the longest delay of a call.
func (l *Lag) Worst() time.Duration { return slices.Max(l.all) }

func (l *Lag) late(over []time.Duration) (n int) {
	for _, d := range over {
		if d > l.Slack {
			n++
		}
	}
	return n
}
