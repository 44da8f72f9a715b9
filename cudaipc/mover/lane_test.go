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
	p := &process{m: &Mover{opts: Options{Limits: DefaultLimits}}}
	p.m.opts.Limits.Ping = math.MaxInt64 / 2
	p.m.table.Init()
	p.calls.init()
	one := &peer{process: p}
	if err := one.Prepare(&cudaipc.Import{Peer: 1}); err != nil {
		t.Fatal(err)
	}
	if err := p.m.table.Add(one); err != nil {
		t.Fatal(err)
	}
	f := &cudaipc.Flight{Copy: &cudaipc.Copy{}}
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
			one.begin(f)
			one.lane(f).pending.Add(-1)
		}
	}()
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); {
		if _, err := p.overdue(p.clock.Load()); err != nil {
			t.Fatalf("a copy that has just begun: %v", err)
		}
	}
}
