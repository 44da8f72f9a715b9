package main

import (
	"context"
	"time"
)

// lagEvery is the wait whose lateness says what the machine itself adds to every deadline.
const lagEvery = 2 * time.Millisecond

// lag measures, in the replay's own process, how late short waits end while a replay runs: what look-ups of an agent on the same machine that go
// over their deadline are held against, because no agent can answer while it is not given a processor.
type lag struct {
	stop chan struct{}
	done chan struct{}
	max  time.Duration // valid when done is closed
}

func startLag(ctx context.Context) *lag {
	l := &lag{stop: make(chan struct{}), done: make(chan struct{})}
	go l.run(ctx)
	return l
}

func (l *lag) run(ctx context.Context) {
	defer close(l.done)
	t := time.NewTimer(lagEvery)
	defer t.Stop()
	for from := time.Now(); ; {
		select {
		case <-t.C:
			l.max = max(l.max, time.Since(from)-lagEvery)
			from = time.Now()
			t.Reset(lagEvery)
		case <-l.stop:
			return
		case <-ctx.Done():
			return
		}
	}
}

// end stops it and gives the most that a wait was late.
func (l *lag) end() time.Duration {
	close(l.stop)
	<-l.done
	return l.max
}
