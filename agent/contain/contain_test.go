package contain

import (
	"slices"
	"testing"
)

// The functions whose panics are contained are a closed list: any other holds state that sessions
// share.
func TestOwnFunctions(t *testing.T) {
	own := []string{
		"ipc.Decode", "ipc.(*Conn).Recv", "lookup.Longest", "pool.Chain.At", "agent.convertSections",
		"agent.(*session).cancel", "agent.(*session).serve.func1",
		"agent.(*jobTable).finish", "agent/report.(*Metrics).CountLookup", "agent.(*lookupSock).handle",
	}
	shared := []string{
		"agent/lease.(*Ledger).Release", "agent.(*Agent).vacate", "agent.(*registry).leave",
		"agent.(*lookupSockets).open",
		"agent.(*session).importRegions",
		"agent.(*session).open.func1", "agent.(*lookupSock).reserve", "pool/dram.(*Pool).Find",
		"pool/tier.(*Pool).Settle", "transfer.(*Worker).Submit",
		"cudaipc.(*Mover).Import", "agent.(*somethingNew).method",
	}
	for _, name := range slices.Concat(own, shared) {
		if got, want := isSessionOwned(name), slices.Contains(own, name); got != want {
			t.Errorf("%s: own %v, want %v", name, got, want)
		}
	}
}
