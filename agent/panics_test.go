package agent

import (
	"bytes"
	"os"
	"os/exec"
	"sync/atomic"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
)

// withPanicAt makes the log panic when it is to say something for the nth time: a defect in whoever
// says it.
func withPanicAt(message string, nth int64) rigOption {
	var said atomic.Int64
	return func(c *rigConfig) {
		c.log = append(c.log, zap.Hooks(func(e zapcore.Entry) error {
			if e.Message == message && said.Add(1) == nth {
				panic("a defect")
			}
			return nil
		}))
	}
}

// sharedEnv tells this test's process where to panic.
const sharedEnv = "KVAGENT_TEST_PANIC_OVER"

// A panic over what sessions share must not be survived: a lock may be held, or a book be half
// written.
func TestPanicOverSharedStateEndsTheProcess(t *testing.T) {
	switch os.Getenv(sharedEnv) {
	case "sockets": // under lookupSockets.mu
		r := newRig(t, withPanicAt("look-up socket open", 2), withPool(1<<20))
		m := register("one")
		m.LookupName = "one"
		r.joinEngine(m)
		t.Fatal("survived")
	case "pool": // in a look-up
		r := newRig(t)
		_, _, answer := r.joinEngine(register("one"))
		r.agent.sockets.answers.index = nil
		ask(t, r.asker(socketdir.Lookup),
			ipc.LookupRequest{Space: answer.Space, Tokens: 100, Want: ipc.WantReserve, HashLen: 32,
				Hashes: chain(1, 4)})
		t.Fatal("survived")
	}
	for where, says := range map[string]string{"sockets": "(*lookupSockets)", "pool": "(*lookupSock).reserve"} {
		cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
		cmd.Env = append(os.Environ(), sharedEnv+"="+where)
		out, err := cmd.CombinedOutput()
		if err == nil || !bytes.Contains(out, []byte("panic: ")) || !bytes.Contains(out, []byte(says)) ||
			bytes.Contains(out, []byte("survived")) {
			t.Errorf("%s: %v\n%s", where, err, out)
		}
	}
}
