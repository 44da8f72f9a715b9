package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/adminclient"
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
	if s.asJSON {
		_, err = cmd.OutOrStdout().Write(body)
		return err
	}
	var held admin.CacheTier
	if err := json.Unmarshal(body, &held); err != nil {
		return fmt.Errorf("cache ls: %w", err)
	}
	return printTier(cmd.OutOrStdout(), &held, skip)
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
