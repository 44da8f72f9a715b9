package agent

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/ipc"
)

// Where a session's panic is met, as its counter says it.
const (
	panicReader     = "reader"     // a message is read and served
	panicWriter     = "writer"     // a message is sent
	panicCompletion = "completion" // a job that has ended is reported
	panicHeld       = "held"       // a held load goes on
)

var panicPlaces = [...]string{panicReader, panicWriter, panicCompletion, panicHeld}

// protect runs what a goroutine does for one session. A panic ends that session: its jobs are
// cancelled, its regions closed, its leases dropped, its socket ended, as for any other reason. But
// one that met anything that sessions share goes on, and ends the process: see sharedOnStack.
func (s *session) protect(where string, f func()) {
	defer func() {
		v := recover()
		if v == nil {
			return
		}
		if shared := sharedOnStack(); shared != "" {
			s.log.Error("panic over shared state: the process ends", zap.String("where", where), zap.String("in", shared),
				zap.Any("value", v))
			panic(v)
		}
		s.owner.metrics.Panics[where].Add(1)
		s.log.Error("panic: the session ends", zap.String("where", where), zap.Any("value", v), zap.ByteString("stack",
			debug.Stack()))
		s.doom(endPanic, ipc.ErrCodeInternal, fmt.Errorf("a defect of the agent, in its %s; register again", where))
	}()
	f()
}

// thisModule is how the names of this module's functions begin.
const thisModule = "github.com/kvagent/kvagent/"

// ownPackages hold no state that sessions share: a message, a chain of hashes, a rule, a counter,
// a registration.
var ownPackages = []string{"agent/admin", "agent/registration", "ipc", "lookup", "pool"}

// ownReceivers are the types of this package whose values belong to one session, or to one look-up
// socket and the request that has its turn. A function without a receiver holds nothing.
var ownReceivers = []string{
	"(*session)", "(*heldLoad)", "(*heldLoads)", "(*settling)", "(*seat)", "(*jobTable)",
	"(*outbox)", "(*stepPace)", "(*lookupSock)",
}

// handsFull are the methods of those types that have something shared in hand while they run: a
// descriptor of the session's socket and a peer's number, or pins that are in no lease yet.
var handsFull = []string{"(*session).open", "(*session).importRegions", "(*lookupSock).reserve",
	"(*lookupSock).lend", "(*lookupSock).hint"}

// sharedOnStack names the function on a panic's stack that holds, or may hold, what sessions share:
// the ledger, the registry, the pool, a device, a worker, whatever is under a mutex of theirs. Such
// a panic may have left a book half written or a lock held, and only a new process is sure to have
// neither. It is called while the panic's frames are still on the stack: by a deferred function.
// Empty: there is none, and the panic can be contained. Of the frames below protect, which called
// what panicked, nothing is asked: that is the caller's, and is as it was.
func sharedOnStack() string {
	counters := make([]uintptr, 256)
	n := runtime.Callers(2, counters)
	frames := runtime.CallersFrames(counters[:n])
	panicked := false
	for more := true; more; {
		var f runtime.Frame
		f, more = frames.Next()
		switch name, ours := strings.CutPrefix(f.Function, thisModule); {
		case f.Function == "runtime.gopanic":
			panicked = true
		case panicked && name == "agent.(*session).protect":
			return ""
		case panicked && ours && !isOwn(name):
			return name
		}
	}
	if n == len(counters) {
		return "a stack of more than 256 frames"
	}
	return ""
}

// isOwn says whether a function of this module touches nothing that sessions share. One that is not
// known does.
func isOwn(name string) bool {
	at := strings.LastIndexByte(name, '/') + 1
	pkg, function, _ := strings.Cut(name[at:], ".")
	if pkg = name[:at] + pkg; slices.Contains(ownPackages, pkg) {
		return true
	}
	if pkg != "agent" {
		return false
	}
	if slices.ContainsFunc(handsFull, func(f string) bool { return function == f || strings.HasPrefix(function, f+".") }) {
		return false
	}
	receiver, _, method := strings.Cut(function, ").")
	return !method || slices.Contains(ownReceivers, receiver+")")
}
