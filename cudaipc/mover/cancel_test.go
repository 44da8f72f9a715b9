package mover_test

import (
	"errors"
	"testing"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/cudaipc/mover"
)

// cancelledImport imports for a peer that has died when the mover is asked.
func (m *fixture) cancelledImport() error {
	m.t.Helper()
	if err := m.mover.Start(); err != nil {
		m.t.Fatal(err)
	}
	im, gone, asked := m.imports(1), make(chan struct{}), m.mover.Movers()[0].Requests
	im.Cancelled = gone
	done := make(chan error, 1)
	go func() { done <- m.imported(1, im) }()
	devicetest.Until(m.t, "the mover is asked", func() bool { return m.mover.Movers()[0].Requests > asked })
	close(gone)
	return <-done
}

// losses counts how often a mover was lost.
func losses(s cudaipc.MoverState) (n uint64) {
	for _, one := range s.Lost {
		n += one
	}
	return n
}

// What a cancelled import has opened is closed, and the mover goes on. If it does not end, the
// mover is killed, long before Limits.Import. A start that hangs is not waited for.
func TestImportOfOneWhoIsGone(t *testing.T) {
	t.Run("ends", func(t *testing.T) {
		t.Parallel()
		m := newFixture(t, func(o *mover.Options) { o.Device, o.Limits.Cancel = slowInImport, testTimeout })
		if err := m.cancelledImport(); !errors.Is(err, cudaipc.ErrPeer) {
			t.Errorf("%v, want ErrPeer", err)
		}
		if s := m.mover.Movers()[0]; s.PID == 0 || s.Peers != 0 || losses(s) != 0 {
			t.Errorf("%+v, want a mover that goes on, without peers", s)
		}
	})
	t.Run("hangs", func(t *testing.T) {
		t.Parallel()
		m := newFixture(t, func(o *mover.Options) { o.Device, o.Limits.Cancel = hangsInImport, 200*time.Millisecond })
		var lost *cudaipc.LostError
		began := time.Now()
		defer func() {
			if took := time.Since(began); took > testTimeout/2 {
				t.Errorf("it took %v, as long as an import may take", took)
			}
		}()
		if err := m.cancelledImport(); !errors.As(err, &lost) || lost.Reason != cudaipc.LostCall {
			t.Errorf("%v, want the loss of the mover by its limit", err)
		}
	})
	t.Run("start", func(t *testing.T) {
		t.Parallel()
		m := newFixture(t, func(o *mover.Options) { o.Device, o.Limits.Start = hangsInOpen, time.Second })
		im := m.imports(1)
		gone := make(chan struct{})
		close(gone)
		im.Cancelled = gone
		if err := m.imported(1, im); !errors.Is(err, cudaipc.ErrPeer) || errors.As(err, new(*cudaipc.LostError)) {
			t.Errorf("%v, want ErrPeer before the start is over", err)
		}
	})
}
