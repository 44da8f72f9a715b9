// Package contain decides whether a panic concerns one session only, or state that sessions share:
// by the functions on its stack.
package contain

import (
	"runtime"
	"slices"
	"strings"
)

// thisModule is the prefix of the names of this module's functions.
const thisModule = "github.com/kvagent/kvagent/"

// sessionPackages are packages without state shared by sessions: messages, hash chains, rules,
// counters, registrations.
var sessionPackages = []string{
	"agent/report", "agent/registration", "ipc", "lookup", "pool",
}

// sessionReceivers are the types of package agent whose values belong to one session, or to one
// look-up socket and its current request. A function without a receiver holds nothing.
var sessionReceivers = []string{
	"(*session)", "(*heldLoad)", "(*heldLoads)", "(*seat)", "(*lookupSock)", "(*outbox)", "(*jobTable)",
}

// holdsShared are the methods of those types that hold a shared resource while they run: a
// descriptor of the session's socket and a peer's number, or pins that are in no lease yet.
var holdsShared = []string{"(*session).open", "(*session).importRegions", "(*lookupSock).reserve",
	"(*lookupSock).addLease", "(*lookupSock).hint"}

// SharedOnStack returns the function on a panic's stack that holds, or may hold, state shared by
// sessions: the ledger, the registry, the pool, a device, a worker. Such a panic may have left a
// structure half written or a lock held. It returns "" if there is none and the panic can be
// contained. A deferred function calls it, while the panic's frames are on the stack; the frames of
// protect's callers are not considered.
func SharedOnStack() string {
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
		case panicked && ours && !isSessionOwned(name):
			return name
		}
	}
	if n == len(counters) {
		return "a stack of more than 256 frames"
	}
	return ""
}

// isSessionOwned reports whether a function of this module touches no state shared by sessions. An
// unknown function is assumed to touch some.
func isSessionOwned(name string) bool {
	at := strings.LastIndexByte(name, '/') + 1
	pkg, function, _ := strings.Cut(name[at:], ".")
	if pkg = name[:at] + pkg; slices.Contains(sessionPackages, pkg) {
		return true
	}
	if pkg != "agent" {
		return false
	}
	if at := strings.LastIndex(function, "(*"); at > 0 { // a closure of a method that was inlined
		function = function[at:]
	}
	if slices.ContainsFunc(holdsShared,
		func(f string) bool { return function == f || strings.HasPrefix(function, f+".") }) {
		return false
	}
	receiver, _, method := strings.Cut(function, ").")
	return !method || slices.Contains(sessionReceivers, receiver+")")
}
