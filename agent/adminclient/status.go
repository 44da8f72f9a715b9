package adminclient

import (
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/delivery"
	"github.com/kvagent/kvagent/agent/report"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/settings"
)

func statusCommand() *cobra.Command {
	return askCommand(&cobra.Command{
		Use:   "status",
		Short: "Show the state of a running agent",
		Long: `Status asks the agent of a socket directory through admin.sock. It shows the connected engines and their
missing ranks, the use of the pool, the hit rate of look-ups, the queues, and problems.`,
		Example: `  kvagent status --socket-dir /run/kvagent
  kvagent status --json | jq .hit_rate`,
	}, func(a *ask, _ []string) error {
		body, err := a.Get(a.Context(), "/status")
		return show(a, body, err, printStatus)
	})
}

func printStatus(out io.Writer, st *admin.Status) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	state := "ready"
	if st.Problem != "" {
		state = st.Problem
	}
	fmt.Fprintf(t, "agent\t%s, process %d, up %v, version %s\n", state, st.PID, seconds(st.UptimeSeconds), st.Version)
	fmt.Fprintf(t, "switches\tloads %s, saves %s\n", onOff(st.Switches.Loads), onOff(st.Switches.Saves))
	fmt.Fprintf(t, "pool\t%s used of %s, %s pinned, %d blocks, %d evicted\n",
		settings.HumanSize(st.Pool.Used), settings.HumanSize(st.Pool.Capacity), settings.HumanSize(st.Pool.Pinned),
		st.BlocksStored, st.Pool.Evicted)
	if e := &st.Pool.Policy; e.Lookups > 0 {
		fmt.Fprintf(t, "eviction\t%s; hits: %.1f %% of blocks, %.1f %% in an unlimited pool; %d refused\n", e.Name,
			100*float64(e.Hits)/float64(e.Lookups), 100*float64(e.Hits+e.Beyond)/float64(e.Lookups), e.Refused)
	}
	for _, o := range st.Pool.Owners.Each {
		fmt.Fprintf(t, "\t%s of %s belong to %s, %d evicted and %d refused for it\n", settings.HumanSize(o.Bytes),
			settings.HumanSize(o.Budget), o.Name, o.Evicted, o.Refused)
	}
	if b := &st.Pool.Bad; b.Pages > 0 {
		fmt.Fprintf(t, "\t%d BAD PAGES (limit %d), %s of the pool not used (limit %s), %d blocks dropped\n",
			b.Pages, b.MaxPages, settings.HumanSize(b.Bytes), settings.HumanSize(b.MaxBytes), b.Dropped)
	}
	fmt.Fprintf(t, "look-ups\t%d, %d with a hit; %.1f %% of tokens found\n", st.Lookups, st.LookupHits, 100*st.HitRate)
	fmt.Fprintf(t, "blocks\t%d saved (%s), %d loaded (%s)\n",
		st.BlocksSaved, settings.HumanSize(int64(st.BytesSaved)), st.BlocksLoaded,
		settings.HumanSize(int64(st.BytesLoaded)))
	printSample(t, &st.Sample)
	fmt.Fprintf(t, "leases\t%d open (%s), %d given, %d revoked\n", st.Leases, settings.HumanSize(st.LeaseBytes),
		st.LeasesGiven, st.LeasesRevoked)
	if h := &st.Hints; h.PinnedBlocks+h.Pending > 0 || h.Helped+h.InVain > 0 {
		fmt.Fprintf(t, "hints\t%d blocks pinned (%s of %s), %s retained, %d actions go on\n", h.PinnedBlocks,
			settings.HumanSize(h.PinnedBytes), settings.HumanSize(h.PinBudget), settings.HumanSize(h.Retained),
			h.Pending)
		fmt.Fprintf(t, "\t%d blocks of them helped, %d were in vain\n", h.Helped, h.InVain)
	}
	printTiers(t, st.Tiers)
	printTransfers(t, &st.Transfers, st.Peers)
	fmt.Fprintf(t, "engines\t%d, %d regions open, %d jobs, clean-up at most %.1f ms\n", st.Engines, st.Regions, st.Jobs,
		st.CleanupMaxMS)
	for i := range st.Movers {
		printMover(t, &st.Movers[i])
	}
	if st.Abandoned != "" {
		fmt.Fprintf(t, "pool file\tabandoned, the pool started empty in a new one: %s\n", st.Abandoned)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if len(st.EngineList) == 0 {
		return nil
	}
	fmt.Fprintln(out)
	return printEngines(out, st.EngineList)
}

// printTransfers prints what engines promise each other, and the agents of other nodes.
func printTransfers(t io.Writer, x *delivery.Report, p *admin.PeersStatus) {
	if x.Opened+x.Fetches == 0 && (p == nil || p.Address == "") {
		return
	}
	fmt.Fprintf(t, "transfers\t%d open, %d complete; %d delivered, %d expired, %d refused\n", x.Open,
		x.Complete, x.Delivered, x.Expired, x.Refused)
	if p == nil {
		return
	}
	if p.Address != "" {
		fmt.Fprintf(t, "peers\tat %s: %d connections, %d fetches served now, %s sent\n", p.Address, p.Connections,
			p.Subscriptions, settings.HumanSize(int64(p.BytesSent)))
	}
	if r := p.Reads; r != nil {
		fmt.Fprintf(t, "\tone-sided reads (%s): %s, %d blocks (%s) read, %d reads failed, %d blocks read by others",
			r.Protocol, r.State, r.Blocks, settings.HumanSize(int64(r.Bytes)), r.Failed, r.Placed)
		if r.Error != "" {
			fmt.Fprintf(t, "; %s", r.Error)
		}
		fmt.Fprintln(t)
	}
	for i := range p.Fetched {
		one := &p.Fetched[i]
		fmt.Fprintf(t, "\tfrom %s: %s, %d fetches now", one.Peer, one.State, one.Fetches)
		if one.Error != "" {
			fmt.Fprintf(t, "; %s", one.Error)
		}
		fmt.Fprintln(t)
	}
}

// printSample prints the results of the end-to-end check.
func printSample(t io.Writer, s *report.SampleStatus) {
	if s.Every == 0 {
		fmt.Fprintf(t, "end to end\tno block is checked (--verify-sample 0)\n")
		return
	}
	fmt.Fprintf(t, "end to end\t1 block in %d checked: %d saved and %d loaded match, %d not verified, %d MISMATCHED",
		s.Every, s.Saves.Matched, s.Loads.Matched,
		s.Saves.Unverified+s.Loads.Unverified, s.Saves.Mismatched+s.Loads.Mismatched)
	if s.LastMismatch != "" {
		fmt.Fprintf(t, "; last: %s", s.LastMismatch)
	}
	fmt.Fprintln(t)
}

func printMover(t io.Writer, m *cudaipc.MoverState) {
	var lost uint64
	for _, n := range m.Lost {
		lost += n
	}
	state := "no process"
	if m.Running {
		state = fmt.Sprintf("process %d, up %v", m.PID, seconds(m.UpSeconds))
	}
	fmt.Fprintf(t, "mover %s\t%s, %d workers, %d copies, started %d times, lost %d", m.Name, state, m.Peers, m.Copies,
		m.Starts, lost)
	if m.LastLoss != "" {
		fmt.Fprintf(t, "; last: %s", m.LastLoss)
	}
	fmt.Fprintln(t)
	if m.GPU != nil {
		printGPU(t, m.GPU)
	}
}

// printGPU prints a mover's GPU in one line.
func printGPU(t io.Writer, i *cudaipc.CUDAInfo) {
	fmt.Fprintf(t, "\t%s, %s free of %s; %s pinned of %s", i.Name, settings.HumanSize(i.Free),
		settings.HumanSize(i.Total), settings.HumanSize(i.Pinned), settings.HumanSize(i.Arena))
	if i.PinError != "" {
		fmt.Fprintf(t, ", %s REFUSED (%s), %s copied through the ring", settings.HumanSize(i.Refused), i.PinError,
			settings.HumanSize(int64(i.RingBytes)))
	}
	fmt.Fprintln(t)
}

func printEngines(out io.Writer, engines []report.EngineStatus) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "ENGINE\tMODEL\tRANKS\tSESSION\tPROCESS\tREGIONS\tSAVES\tLOADS\tUNSENT\tNOW")
	for i := range engines {
		e := &engines[i]
		ranks := fmt.Sprintf("%d, complete", e.World)
		if !e.Complete {
			ranks = fmt.Sprintf("%d, incomplete", e.World)
		}
		for j := range e.Sessions {
			s := &e.Sessions[j]
			role := s.Role
			if role == "worker" {
				role = fmt.Sprintf("rank %d", s.Rank)
			}
			now := s.Step
			if s.StepMS > 0 {
				now += fmt.Sprintf(" for %v", time.Duration(s.StepMS)*time.Millisecond)
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%d\t%s\n", e.Instance, e.Model, ranks, role, s.PID,
				s.Regions, s.SaveQueue, s.LoadQueue, s.Outbox, now)
		}
	}
	return t.Flush()
}

func onOff(on bool) string {
	if on {
		return "on"
	}
	return "off"
}

func seconds(s float64) time.Duration {
	return time.Duration(s * float64(time.Second)).Round(time.Second)
}

// storeOK is the state of a store without problems.
const storeOK = "ok"

// printTiers prints a line for each tier.
func printTiers(t io.Writer, tiers *pool.TierReport) {
	if tiers == nil {
		return
	}
	for i := range tiers.Tiers {
		s := &tiers.Tiers[i]
		state := tierState(s)
		if s.Usage.Bytes > 0 {
			state += ", " + settings.HumanSize(s.Usage.Bytes)
		}
		if s.Usage.Capacity > 0 {
			state += " of " + settings.HumanSize(s.Usage.Capacity)
		}
		fmt.Fprintf(t, "tier %s\t%s; %d blocks read (%s), %d missed; %d written (%s), %d not; %d damaged\n",
			s.Name, state, s.Hits, settings.HumanSize(int64(s.BytesIn)), s.Misses, s.Stored,
			settings.HumanSize(int64(s.BytesOut)), s.Dropped+s.Full+s.Lost, s.Corrupt)
	}
	fmt.Fprintf(t, "prefetch\t%d blocks being fetched (%s of %s), %d arrived, %d failed\n",
		tiers.Promises, settings.HumanSize(tiers.PromiseBytes), settings.HumanSize(tiers.PromiseCap), tiers.Fulfilled,
		tiers.Failed)
}

// tierState returns a tier's state, with its error or its store's own state.
func tierState(s *pool.TierStatus) string {
	switch {
	case s.Error != "":
		return s.State + " (" + s.Error + ")"
	case s.Store.State != "" && s.Store.State != storeOK:
		return s.State + ", " + s.Store.State + " (" + s.Store.Reason + ")"
	}
	return s.State
}
