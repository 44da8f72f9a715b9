package agent

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/transfer"
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

// A panic over one session's message ends that session as its peer's death would, loudly and
// counted, and no other.
func TestPanicEndsOneSession(t *testing.T) {
	r := newRig(t, withPanicAt("unregistered", 1))
	_, others, answer := r.joinEngine(register("other"))
	_, workers, _ := r.joinEngine(register("one"))
	w := workers[0]
	if got := w.save(answer.Epoch, chain(3, 4), 0); !all(got, blockOK) {
		t.Fatalf("save: %v", got)
	}
	w.send(&ipc.Unregister{Req: 7})
	if got := next[*ipc.Error](w); got.Code != ipc.ErrCodeInternal {
		t.Errorf("%+v, want code %d", got, ipc.ErrCodeInternal)
	}
	r.waitFor("the session is gone", func(s admin.Status) bool { return s.Sessions == 3 && s.Regions == 2 })
	if got := others[0].load(answer.Epoch, 0, chain(3, 4), 8); !all(got, blockOK) {
		t.Errorf("another session's load: %v", got)
	}
	text := r.metricsText()
	for _, line := range []string{
		`kvagent_session_panics_total{where="reader"} 1`, `kvagent_session_panics_total{where="writer"} 0`,
		`kvagent_session_panics_total{where="held"} 0`,
		`kvagent_session_panics_total{where="completion"} 0`, `kvagent_session_ends_total{reason="panic"} 1`,
	} {
		if !strings.Contains(text, line) {
			t.Errorf("metrics have no %s", line)
		}
	}
	logged := r.logs.FilterMessage("panic: the session ends").All()
	if len(logged) != 1 || !strings.Contains(logged[0].ContextMap()["stack"].(string), "unregisterLocked") {
		t.Errorf("logged %v", logged)
	}
}

// A panic in the middle of what a registration undoes and does leaves nothing open.
func TestPanicAtRegistered(t *testing.T) {
	r := newRig(t, withPanicAt("registered", 1))
	w := r.dial()
	m := register("one")
	regions, fds, segments := w.prepare(m)
	w.send(m)
	w.send(regions, fds...)
	w.send(segments)
	next[*ipc.Error](w)
	r.waitFor("nothing is left",
		func(s admin.Status) bool { return s.Sessions == 0 && s.Regions == 0 && s.Engines == 0 })
}

// A report for a session must not end the threads of its worker, nor a tier's.
func TestPanicOfACompletionIsContained(t *testing.T) {
	r := newRig(t)
	s := &session{owner: r.agent.sessions, log: r.agent.log, ending: make(chan struct{})} // without an outbox
	s.complete(transfer.Completion{Job: 1, Kind: transfer.Load, Status: []pool.Status{pool.OK}})
	<-s.ending
	if s.end.reason != endPanic || r.agent.metrics.Panics[panicCompletion].Load() != 1 {
		t.Errorf("end %q, %d counted", s.end.reason, r.agent.metrics.Panics[panicCompletion].Load())
	}
}

// A look-up that panics ends its connection at most; the others of the socket are answered.
func TestPanicOfALookupIsContained(t *testing.T) {
	r := newRig(t, withPanicAt("malformed look-up", 1))
	_, err := r.foreign(t, socketdir.Lookup).soc.SendMessage("?")
	check(t, err)
	pooltest.Until(t, "the panic is counted", func() bool {
		return strings.Contains(r.metricsText(),
			`kvagent_lookup_faults_total{fault="panic"} 1`)
	})
	if got := ask(t, r.asker(socketdir.Lookup), ipc.LookupRequest{Tokens: 100}); got.Status != ipc.LookupNotRegistered {
		t.Errorf("another look-up: %+v", got)
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
