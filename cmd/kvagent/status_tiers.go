package main

import (
	"fmt"
	"io"

	"github.com/kvagent/kvagent/agent"
)

// storeOK is the state of a store that has nothing to say.
const storeOK = "ok"

// printTiers is a line for each tier, in the table of status.
func printTiers(t io.Writer, tiers *agent.TiersStatus) {
	if tiers == nil {
		return
	}
	for i := range tiers.List {
		s := &tiers.List[i]
		state := tierState(s)
		size := humanSize(s.Used)
		if s.Capacity > 0 {
			size += " of " + humanSize(s.Capacity)
		}
		fmt.Fprintf(t, "tier %s\t%s, %s; %d blocks read (%s), %d did not come; %d written (%s), %d not; %d damaged\n",
			s.Name, state, size, s.Hits, humanSize(int64(s.BytesIn)), s.Misses, s.Stored, humanSize(int64(s.BytesOut)), s.Dropped+s.Failed, s.Corrupt)
	}
	fmt.Fprintf(t, "prefetch\t%d blocks on their way (%s of %s), %d came, %d did not\n",
		tiers.Promises, humanSize(tiers.PromiseBytes), humanSize(tiers.PromiseCap), tiers.Kept, tiers.Unkept)
	printResets(t, tiers)
}

// printResets says what came of resets, if anything did.
func printResets(t io.Writer, tiers *agent.TiersStatus) {
	shards, bytes, fails, marks := uint64(0), uint64(0), uint64(0), uint64(0)
	for i := range tiers.List {
		s := &tiers.List[i]
		shards, bytes = shards+s.Collected, bytes+s.CollectedBytes
		fails, marks = fails+s.CollectFails, marks+s.MarkFails
	}
	if tiers.Adopted+tiers.Again+shards+fails+marks+uint64(tiers.Names)+tiers.Unused == 0 {
		return
	}
	fmt.Fprintf(t, "resets\t%d of other nodes, %d repeated; %d named generations unused, %d of them used elsewhere; "+
		"%d names to be collected, %d shards (%s) collected; %d looks failed, %d rounds for markers\n",
		tiers.Adopted, tiers.Again, tiers.Unused, tiers.Elsewhere, tiers.Names, shards, humanSize(int64(bytes)), fails, marks)
}

// tierState is a tier's state, with its error or what its store says besides.
func tierState(s *agent.TierStatus) string {
	switch {
	case s.Error != "":
		return s.State + " (" + s.Error + ")"
	case s.Store != "" && s.Store != storeOK:
		return s.State + ", " + s.Store + " (" + s.Reason + ")"
	}
	return s.State
}
