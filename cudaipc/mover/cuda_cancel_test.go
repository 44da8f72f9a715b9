//go:build cuda

package mover_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/cudaipc/mover"
)

// openHeld returns an import of GPU memory whose engine dies while the driver opens the memory.
func openHeld(t *testing.T, limits mover.Limits) (m *fixture, held heldCopies, done <-chan error) {
	t.Helper()
	list := filepath.Join(t.TempDir(), "calls")
	held, _ = holdCopies(t)
	held.hold()
	m = newCUDAFixture(t, faultEngine(t), limits, "SOFTCUDA_OPEN_HELD="+held.file, "SOFTCUDA_CALLS="+list)
	if err := m.mover.Start(); err != nil {
		t.Fatal(err)
	}
	im, gone, result := m.imports(1), make(chan struct{}), make(chan error, 1)
	im.Cancelled = gone
	go func() { result <- m.imported(1, im) }()
	devicetest.Until(t, "the driver opens the memory", func() bool {
		text, err := os.ReadFile(list)
		return err == nil && strings.Contains(string(text), "cuIpcOpenMemHandle")
	})
	m.engine.Kill()
	close(gone) // as the agent does, which watches the engine
	return m, held, result
}

// An engine dies during a slow import: when the driver's call returns, the mover closes what it has
// opened, and goes on.
func TestCUDAImportOfTheDeadIsStopped(t *testing.T) {
	ownMachine(t)
	m, held, done := openHeld(t, longLimits)
	held.letGo()
	if err := <-done; err == nil { // it is told, or meets a handle of the dead
		t.Error("the import of a dead engine came to its end")
	}
	devicetest.Until(t, "nothing of the engine is open", func() bool {
		s := m.mover.Movers()[0]
		return s.PID != 0 && losses(s) == 0 && s.GPU.Total > 0 && s.GPU.Imports == 0
	})
}

// The same, with a driver's call that does not return: the mover is killed and reaped, which frees
// the memory, by Limits.Cancel and not by that of an import.
func TestCUDAImportOfTheDeadThatHangs(t *testing.T) {
	ownMachine(t)
	limits := longLimits
	limits.Cancel = 200 * time.Millisecond
	m, held, done := openHeld(t, limits)
	var lost *cudaipc.LostError
	if err := <-done; !errors.As(err, &lost) || lost.Reason != cudaipc.LostCall {
		t.Errorf("%v, want the loss of the mover by its limit", err)
	}
	if _, err := os.Stat(held.file); err != nil || m.mover.Movers()[0].PID != 0 {
		t.Errorf("%v; %+v: the call came back, or the mover is there", err, m.mover.Movers()[0])
	}
}
