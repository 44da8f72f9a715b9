package mover

import (
	"math"
	"testing"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
)

// TestFirstCopyAfterAPauseIsNotOverdue checks a mover's limits while copies begin and end after
// long pauses.
func TestFirstCopyAfterAPauseIsNotOverdue(t *testing.T) {
	p := &process{m: &Mover{opts: Options{Limits: DefaultLimits}}, flights: map[uint64]flight{}}
	p.m.opts.Limits.Ping = math.MaxInt64 / 2
	one := &peer{process: p}
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			p.clock.Add(1 + p.ticks(DefaultLimits.Copy))
			number, err := one.begin(&cudaipc.Flight{}, 0)
			if err != nil {
				panic(err)
			}
			p.m.mu.Lock()
			delete(p.flights, number)
			one.lanes[0].pending--
			p.m.mu.Unlock()
		}
	}()
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); {
		if _, err := p.overdue(p.clock.Load()); err != nil {
			t.Fatalf("a copy that has just begun: %v", err)
		}
	}
}
