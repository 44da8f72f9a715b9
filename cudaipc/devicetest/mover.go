package devicetest

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/mover"
)

// moverEnv is set in the process that plays a mover.
const moverEnv = "KVAGENT_DEVICETEST_MOVER"

// MoverEnv is the environment (mover.Options.Env) of a mover that is this test binary. Its TestMain
// calls Child, or, for devices other than the host's, Mover. The race detector would make its end a
// second longer.
var MoverEnv = []string{moverEnv + "=1", "GORACE=atexit_sleep_ms=0"}

// MoverCommand is the command line (mover.Options.Command) of a mover that is this test binary.
var MoverCommand = []string{"/proc/self/exe"}

// Mover serves as a mover with devices that open opens, and does not return, in a process that
// was started as one.
func Mover(open mover.OpenDevice) {
	if os.Getenv(moverEnv) == "" {
		return
	}
	if err := mover.Run(open); err != nil {
		fmt.Fprintln(os.Stderr, "mover:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// MoverFixture returns Host in a mover. change may change its options.
func MoverFixture(t T, arenaSize int64, kind cudaipc.Kind, change func(*mover.Options)) Fixture {
	t.Helper()
	mover, arena := OpenMover(t, arenaSize, change)
	t.Cleanup(func() { closeDevice(t, mover) })
	engine := func(t T, s Spec) Engine { return HostEngine(t, s, kind) }
	return Fixture{Device: mover, Arena: arena, Engine: engine}
}

// OpenMover returns a mover of the host device, whose options change may change, and its arena. The
// caller closes it.
func OpenMover(t T, arenaSize int64, change func(*mover.Options)) (*mover.Mover, []byte) {
	t.Helper()
	fd, arena := newArena(t, arenaSize)
	defer func() { _ = unix.Close(fd) }()
	o := mover.Options{
		Name: "test", Device: cudaipc.HostDevice, ArenaFD: fd, ArenaSize: arenaSize,
		Command: MoverCommand, Env: MoverEnv, Node: -1,
	}
	change(&o)
	mover, err := mover.New(o)
	if err != nil {
		t.Fatal(err)
	}
	return mover, arena
}
