package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/adminclient"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/settings"
)

// tierTimeout exceeds the time that an agent takes to list a tier, or to remove what one request
// may remove.
const tierTimeout = 15 * time.Second

// tierAdmin returns a client whose timeout lets the agent read a tier.
func tierAdmin(s *cacheSettings) *adminclient.Client {
	a := adminclient.New(*s.dir)
	a.Within(tierTimeout)
	return a
}

func listTier(cmd *cobra.Command, s *cacheSettings, blocks, skip int) error {
	q := s.filter()
	q.Set("tier", s.tier)
	q.Set("blocks", strconv.Itoa(blocks))
	q.Set("skip", strconv.Itoa(skip))
	body, err := tierAdmin(s).Get(cmd.Context(), "/cache/tier?"+q.Encode())
	if err != nil {
		return err
	}
	return show(cmd, body, s.asJSON, func(out io.Writer, held *admin.CacheTier) error {
		return printTier(out, held, skip)
	})
}

func printTier(out io.Writer, held *admin.CacheTier, skip int) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "SPACE\tMODEL\tTENANT\tSHARDS\tBYTES")
	var all int64
	for i := range held.Spaces {
		s := &held.Spaces[i]
		model := s.Model
		if !s.Known {
			model = "(not known here)"
		}
		all += s.Shards
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", s.Space, model, s.Tenant, settings.Thousands(int(s.Shards)),
			settings.HumanSize(s.Bytes))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if len(held.Blocks) > 0 {
		fmt.Fprintln(t, "\nSPACE\tGROUP\tSHARD\tBYTES\tHASH")
		for i := range held.Blocks {
			b := &held.Blocks[i]
			fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%s\n", b.Space, b.Group, b.Shard, b.Bytes, b.Hash)
		}
		if err := t.Flush(); err != nil {
			return err
		}
		if next := skip + len(held.Blocks); int64(next) < all {
			fmt.Fprintf(out, "more: --skip %d\n", next)
		}
	}
	if !held.Complete {
		fmt.Fprintln(out, "cut: the tier holds more than was read in the time there is")
	}
	return nil
}

// removeFromTier repeats the request until nothing is left, because one request removes a bounded
// number.
func removeFromTier(cmd *cobra.Command, s *cacheSettings, dry bool) error {
	q := s.filter()
	q.Set("tier", s.tier)
	if dry {
		q.Set("dry", "1")
	}
	all := admin.CacheTierRemoved{Tier: s.tier, Dry: dry}
	for {
		body, err := tierAdmin(s).Post(cmd.Context(), "/cache/tier/rm?"+q.Encode(), nil)
		if err != nil {
			return err
		}
		var some admin.CacheTierRemoved
		if err := json.Unmarshal(body, &some); err != nil {
			return fmt.Errorf("cache rm: %w", err)
		}
		all.Shards, all.Bytes, all.Complete = all.Shards+some.Shards, all.Bytes+some.Bytes, some.Complete
		if some.Complete || some.Dry || some.Shards == 0 {
			return printTierRemoved(cmd.OutOrStdout(), &all, s.asJSON)
		}
	}
}

func printTierRemoved(out io.Writer, r *admin.CacheTierRemoved, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(out).Encode(r)
	}
	did, cut := "removed", ""
	if r.Dry {
		did = "would remove"
	}
	if !r.Complete {
		cut = ", and there are more"
	}
	_, err := fmt.Fprintf(out, "%s %s shards of %s from %s%s\n", did, settings.Thousands(int(r.Shards)),
		settings.HumanSize(r.Bytes), r.Tier, cut)
	return err
}

const cacheStatHelp = `Stat shows how full memory and each tier are, and what they served since the agent started.
With --space, --model or --tenant it shows how much memory and each tier hold of the picked spaces; tiers are read for
that, at most 5 seconds each.`

func cacheStatCommand() *cobra.Command {
	s := &cacheSettings{}
	cmd := cacheBase(s, "stat", "Show how full memory and tiers are, and what they served", cacheStatHelp, statCache)
	s.addFilter(cmd)
	s.addTier(cmd, "only this tier; memory is the pool")
	return cmd
}

func statCache(cmd *cobra.Command, s *cacheSettings) error {
	body, err := adminclient.New(*s.dir).Get(cmd.Context(), "/cache"+s.query())
	if err != nil {
		return err
	}
	var st admin.CacheStatus
	if err := json.Unmarshal(body, &st); err != nil {
		return fmt.Errorf("cache stat: %w", err)
	}
	if err := pickTier(&st, s.tier); err != nil {
		return err
	}
	switch out := cmd.OutOrStdout(); {
	case len(s.filter()) > 0:
		return printHeld(out, heldOf(cmd, s, &st), s.asJSON)
	case s.asJSON:
		return json.NewEncoder(out).Encode(&st)
	default:
		return printStat(out, s, &st)
	}
}

// pickTier keeps one tier of an agent's answer. Memory is always kept, and its name keeps no tier.
// The empty name keeps all.
func pickTier(st *admin.CacheStatus, name string) error {
	names := []string{memoryTier}
	for i := range st.Tiers {
		names = append(names, st.Tiers[i].Name)
	}
	if name == "" {
		return nil
	}
	if !slices.Contains(names, name) {
		return settings.Invalid(fmt.Errorf("tier: %q, allowed: %s", name, strings.Join(names, ", ")))
	}
	st.Tiers = slices.DeleteFunc(st.Tiers, func(t pool.TierStatus) bool { return t.Name != name })
	return nil
}

func printStat(out io.Writer, s *cacheSettings, st *admin.CacheStatus) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "TIER\tSTATE\tUSED\tOF\tITEMS\tREAD\tNOT THERE\tWRITTEN\tNOT WRITTEN\tDAMAGED\tREAD RATE")
	if s.tier == "" || s.tier == memoryTier {
		fmt.Fprintf(t, "memory\tup\t%s\t%s\t%s\t\t\t\t\t\t\n", settings.HumanSize(st.Pool.Used),
			settings.HumanSize(st.Pool.Capacity), settings.Thousands(int(st.Pool.Entries)))
	}
	for i := range st.Tiers {
		r := &st.Tiers[i]
		of := "not known"
		if r.Usage.Capacity > 0 {
			of = settings.HumanSize(r.Usage.Capacity)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s/s\n", r.Name, tierState(r),
			settings.HumanSize(r.Usage.Bytes), of, settings.Thousands(int(r.Usage.Items)),
			settings.Thousands(int(r.Hits)), settings.Thousands(int(r.Misses)), settings.Thousands(int(r.Stored)),
			settings.Thousands(int(r.Dropped+r.Full+r.Lost)), settings.Thousands(int(r.Corrupt)),
			settings.HumanSize(int64(r.Rate)))
	}
	return t.Flush()
}

// heldTier is the contents of memory, which counts blocks, or of a tier, which counts shards, of
// some spaces.
type heldTier struct {
	Tier     string `json:"tier"`
	Blocks   int64  `json:"blocks"` // -1: not counted
	Shards   int64  `json:"shards"` // -1: not counted
	Bytes    int64  `json:"bytes"`  // -1: not counted
	Complete bool   `json:"complete"`
	Error    string `json:"error,omitempty"` // why it is not known
}

// heldOf asks memory and each tier for their contents of the spaces that a filter picks.
func heldOf(cmd *cobra.Command, s *cacheSettings, st *admin.CacheStatus) (all []heldTier) {
	if s.tier == "" || s.tier == memoryTier {
		memory := heldTier{Tier: memoryTier, Shards: -1, Bytes: -1, Complete: true}
		for i := range st.Spaces {
			memory.Blocks += max(st.Spaces[i].Blocks, 0)
		}
		all = append(all, memory)
	}
	for i := range st.Tiers {
		all = append(all, heldBy(cmd, s, st.Tiers[i].Name))
	}
	return all
}

func heldBy(cmd *cobra.Command, s *cacheSettings, tier string) heldTier {
	q := s.filter()
	q.Set("tier", tier)
	held, err := askTier(cmd, s, q)
	if err != nil {
		return heldTier{Tier: tier, Blocks: -1, Shards: -1, Bytes: -1, Error: err.Error()}
	}
	out := heldTier{Tier: tier, Blocks: -1, Complete: held.Complete}
	for i := range held.Spaces {
		out.Shards += held.Spaces[i].Shards
		out.Bytes += held.Spaces[i].Bytes
	}
	return out
}

func askTier(cmd *cobra.Command, s *cacheSettings, q url.Values) (held admin.CacheTier, err error) {
	body, err := tierAdmin(s).Get(cmd.Context(), "/cache/tier?"+q.Encode())
	if err != nil {
		return held, err
	}
	return held, json.Unmarshal(body, &held)
}

func printHeld(out io.Writer, all []heldTier, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(out).Encode(map[string]any{"held": all})
	}
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "TIER\tBLOCKS\tSHARDS\tBYTES")
	for i := range all {
		h := &all[i]
		switch {
		case h.Error != "":
			fmt.Fprintf(t, "%s\t%s\t\t\n", h.Tier, h.Error)
		case h.Shards < 0:
			fmt.Fprintf(t, "%s\t%s\t\t\n", h.Tier, settings.Thousands(int(h.Blocks)))
		case !h.Complete:
			fmt.Fprintf(t, "%s\t\t%s and more\t%s\n", h.Tier, settings.Thousands(int(h.Shards)),
				settings.HumanSize(h.Bytes))
		default:
			fmt.Fprintf(t, "%s\t\t%s\t%s\n", h.Tier, settings.Thousands(int(h.Shards)), settings.HumanSize(h.Bytes))
		}
	}
	return t.Flush()
}
