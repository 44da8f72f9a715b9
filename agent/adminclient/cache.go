package adminclient

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/report"
	"github.com/kvagent/kvagent/settings"
)

func cacheCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cache",
		Short: "Show what a running agent has stored, and remove it",
		Example: `  kvagent cache ls --model meta-llama/Llama-3.1-8B
  kvagent cache ls --tier disk
  kvagent cache rm --tenant acme
  kvagent cache rm --tier disk --tenant acme`,
	}
	cmd.AddCommand(cacheListCommand(), cacheRemoveCommand())
	return cmd
}

// spaceFilter picks spaces, of all tiers or one.
type spaceFilter struct{ space, model, tenant, tier string }

func (f *spaceFilter) addFlags(cmd *cobra.Command, tierUsage string) {
	cmd.Flags().StringVar(&f.space, "space", "", "only the space with this fingerprint, or its first hex digits")
	cmd.Flags().StringVar(&f.model, "model", "", "only spaces of this model")
	cmd.Flags().StringVar(&f.tenant, "tenant", "", "only spaces of this tenant")
	cmd.Flags().StringVar(&f.tier, "tier", "", tierUsage)
}

// memoryTier is the name of the pool among the tiers.
const memoryTier = "memory"

// query returns the parameters of a request.
func (f *spaceFilter) query() url.Values {
	q := url.Values{}
	for key, value := range map[string]string{
		"space": f.space, "model": f.model, "tenant": f.tenant, "tier": f.tier,
	} {
		if value != "" && value != memoryTier {
			q.Set(key, value)
		}
	}
	return q
}

const cacheListHelp = `Ls lists the spaces that engines registered since the agent started. A space is everything
besides the tokens that determines a block's bytes, such as model, data type and tenant, under one fingerprint.
The blocks shown are those in memory, of all ranks.

With --tier it lists the contents of that tier by space, including what other agents, or this one before a reset,
stored there: such a space has no model, and its name is that in the tier. Shards are parts of blocks: a block has
one for each rank that stores other bytes. The tier is read for at most 5 seconds; a list that was cut is marked.
All tiers but Mooncake can be listed.`

func cacheListCommand() *cobra.Command {
	var f spaceFilter
	cmd := askCommand(&cobra.Command{
		Use: "ls", Short: "List the spaces an agent knows, or what a tier holds", Long: cacheListHelp,
	}, func(a *ask, _ []string) error {
		q := f.query()
		if !q.Has("tier") {
			body, err := a.Get(a.Context(), "/cache?"+q.Encode())
			return show(a, body, err, func(out io.Writer, st *admin.CacheStatus) error {
				return printSpaces(out, st.Spaces)
			})
		}
		a.Within(tierTimeout)
		body, err := a.Get(a.Context(), "/cache/tier?"+q.Encode())
		return show(a, body, err, printTier)
	})
	f.addFlags(cmd, "list the contents of this tier; memory is the pool")
	return cmd
}

func printSpaces(out io.Writer, spaces []report.CacheSpace) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "SPACE\tMODEL\tTENANT\tDTYPE\tGROUPS\tRANKS' SHARDS\tEPOCH\tENGINES\tBLOCKS")
	for i := range spaces {
		s := &spaces[i]
		blocks := "not counted"
		if s.Blocks >= 0 {
			blocks = settings.Thousands(int(s.Blocks))
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%s\n", s.Space, s.Model, s.Tenant, s.Dtype, s.Groups, s.Shards,
			s.Epoch, s.Engines, blocks)
	}
	return t.Flush()
}

const cacheRemoveHelp = `Rm starts a new weights epoch of the spaces that --space, --model and --tenant pick, as a
reset by an engine does. Nothing stored of them before is found again, in memory or in any tier, and their engines are
notified. Other nodes that share a tier follow within seconds, and share again what is stored from
then on. Memory is free at once; what tiers hold under the old name is not read again.

With --tier only that tier's values of the spaces are deleted, for every agent that uses it. Memory and other tiers
keep theirs, and blocks may be written to the tier again. --space then also takes a name that ls --tier shows.
All tiers but Mooncake can do that.`

func cacheRemoveCommand() *cobra.Command {
	var f spaceFilter
	cmd := askCommand(&cobra.Command{
		Use: "rm", Short: "Remove what is stored of some spaces", Long: cacheRemoveHelp,
	}, func(a *ask, _ []string) error {
		switch {
		case f.space+f.model+f.tenant == "":
			return settings.Invalid(errors.New("no filter given, allowed: one or more of --space, --model, --tenant"))
		case f.tier == memoryTier:
			return settings.Invalid(errors.New("tier: memory, allowed: a tier below it; without --tier, memory " +
				"and all tiers are reset"))
		case f.tier != "":
			return removeFromTier(a, &f)
		}
		body, err := a.Post(a.Context(), "/cache/rm?"+f.query().Encode(), nil)
		return show(a, body, err, func(out io.Writer, removed *admin.Removed) error {
			fmt.Fprintf(out, "removed what was stored of %d spaces\n", len(removed.Spaces))
			return printSpaces(out, removed.Spaces)
		})
	})
	f.addFlags(cmd, "delete only what this tier holds")
	return cmd
}

// tierTimeout exceeds the time that an agent takes to list a tier, or to remove what one request
// may remove.
const tierTimeout = 15 * time.Second

func printTier(out io.Writer, held *admin.CacheTier) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "SPACE\tMODEL\tTENANT\tSHARDS\tBYTES")
	for i := range held.Spaces {
		s := &held.Spaces[i]
		model := s.Model
		if !s.Known {
			model = "(not known here)"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", s.Space, model, s.Tenant, settings.Thousands(int(s.Shards)),
			settings.HumanSize(s.Bytes))
	}
	if !held.Complete {
		fmt.Fprintln(t, "cut: the tier holds more than was read in the time there is")
	}
	return t.Flush()
}

// removeFromTier repeats the request until nothing is left, because one request removes a bounded
// number.
func removeFromTier(a *ask, f *spaceFilter) error {
	q := f.query()
	a.Within(tierTimeout)
	all := admin.CacheTierRemoved{Tier: f.tier}
	for more := true; more; {
		body, err := a.Post(a.Context(), "/cache/tier/rm?"+q.Encode(), nil)
		var some admin.CacheTierRemoved
		if err == nil {
			err = json.Unmarshal(body, &some)
		}
		if err != nil {
			return fmt.Errorf("rm: %w", err)
		}
		all.Shards, all.Bytes, all.Complete = all.Shards+some.Shards, all.Bytes+some.Bytes, some.Complete
		more = !some.Complete && some.Shards > 0
	}
	body, err := json.Marshal(&all)
	return show(a, append(body, '\n'), err, printTierRemoved)
}

func printTierRemoved(out io.Writer, r *admin.CacheTierRemoved) error {
	cut := ""
	if !r.Complete {
		cut = ", and there are more"
	}
	_, err := fmt.Fprintf(out, "removed %s shards of %s from %s%s\n", settings.Thousands(int(r.Shards)),
		settings.HumanSize(r.Bytes), r.Tier, cut)
	return err
}
