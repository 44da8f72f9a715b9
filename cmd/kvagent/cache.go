package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/url"
	"os"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/agent"
	"github.com/kvagent/kvagent/agent/adminclient"
	"github.com/kvagent/kvagent/settings"
)

func cacheCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cache",
		Short: "Say what a running agent has stored, and remove it",
		Example: `  kvagent cache ls --model meta-llama/Llama-3.1-8B
  kvagent cache ls --tier disk
  kvagent cache ls --tier disk --space 6f1c --blocks 20
  kvagent cache stat --tier disk
  kvagent cache stat --tenant acme
  kvagent cache rm --tenant acme
  kvagent cache rm --tier disk --tenant acme --dry-run`,
	}
	cmd.AddCommand(cacheListCommand(), cacheStatCommand(), cacheRemoveCommand(), cacheFilesCommand())
	return cmd
}

// cacheSettings are those of the three commands.
type cacheSettings struct {
	dir                  *string
	space, model, tenant string
	tier                 string
	asJSON               bool
}

func cacheBase(s *cacheSettings, use, short, long string, run func(*cobra.Command, *cacheSettings) error) *cobra.Command {
	s.dir = socketDirSetting()
	cmd := &cobra.Command{
		Use: use, Short: short, Long: long, Args: settings.Args(cobra.NoArgs),
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			return settings.Invalid(settings.Fill(cmd.Flags(), os.LookupEnv))
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return run(cmd, s) },
	}
	addSocketDir(cmd, s.dir)
	cmd.Flags().BoolVar(&s.asJSON, "json", false, "print what the agent says, as JSON")
	return cmd
}

// addFilter adds what picks spaces.
func (s *cacheSettings) addFilter(cmd *cobra.Command) {
	cmd.Flags().StringVar(&s.space, "space", "", "only the space with this fingerprint, or its first hex digits")
	cmd.Flags().StringVar(&s.model, "model", "", "only spaces of this model")
	cmd.Flags().StringVar(&s.tenant, "tenant", "", "only spaces of this tenant")
}

func (s *cacheSettings) addTier(cmd *cobra.Command, usage string) {
	cmd.Flags().StringVar(&s.tier, "tier", "", usage)
}

// memoryTier is what the pool is called among the tiers.
const memoryTier = "memory"

func (s *cacheSettings) query() string { return "?" + s.filter().Encode() }

// filter is what picks spaces.
func (s *cacheSettings) filter() url.Values {
	q := url.Values{}
	for key, value := range map[string]string{"space": s.space, "model": s.model, "tenant": s.tenant} {
		if value != "" {
			q.Set(key, value)
		}
	}
	return q
}

func cacheListCommand() *cobra.Command {
	s := &cacheSettings{}
	blocks, skip := 0, 0
	cmd := cacheBase(s, "ls", "List the spaces an agent knows, or what a tier holds", `Ls lists the spaces that engines registered since the agent started: everything besides the tokens that makes
a block, such as model, data type and tenant, under one fingerprint. Blocks are those in memory, of all their ranks.

With --tier it lists what that tier holds by space, also what other agents, or this one before a reset, stored there: such a space
has no model, and its name is the one that it has in the tier. Shards are parts of blocks: a block has one for each rank that
stores other bytes. The tier is read for 5 seconds at most; a list that was cut says so. All but Mooncake tiers can be listed.`,
		func(cmd *cobra.Command, s *cacheSettings) error {
			if s.tier == "" || s.tier == memoryTier {
				if cmd.Flags().Changed("blocks") || cmd.Flags().Changed("skip") {
					return settings.Invalid(errors.New("blocks, skip: allowed with --tier"))
				}
				return listCache(cmd, s)
			}
			return listTier(cmd, s, blocks, skip)
		})
	s.addFilter(cmd)
	s.addTier(cmd, "list what this tier holds; memory is the pool")
	cmd.Flags().Var(settings.Count(&blocks, 0, agent.MaxTierBlocks), "blocks", "name so many shards as well")
	cmd.Flags().Var(settings.Count(&skip, 0, math.MaxInt32), "skip", "pass over so many shards before that")
	return cmd
}

// askCache asks for what a filter picks; with --json it prints that, and ok is false.
func askCache(cmd *cobra.Command, s *cacheSettings) (st agent.CacheStatus, ok bool, err error) {
	body, err := adminclient.New(*s.dir).Get(cmd.Context(), "/cache"+s.query())
	if err != nil {
		return st, false, err
	}
	if s.asJSON {
		_, err = cmd.OutOrStdout().Write(body)
		return st, false, err
	}
	if err := json.Unmarshal(body, &st); err != nil {
		return st, false, fmt.Errorf("cache: %w", err)
	}
	return st, true, nil
}

func listCache(cmd *cobra.Command, s *cacheSettings) error {
	st, ok, err := askCache(cmd, s)
	if !ok {
		return err
	}
	return printSpaces(cmd.OutOrStdout(), st.Spaces)
}

func printSpaces(out io.Writer, spaces []agent.CacheSpace) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "SPACE\tMODEL\tTENANT\tDTYPE\tGROUPS\tRANKS' SHARDS\tEPOCH\tENGINES\tBLOCKS")
	for i := range spaces {
		s := &spaces[i]
		blocks := "not counted"
		if s.Blocks >= 0 {
			blocks = settings.Thousands(int(s.Blocks))
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%s\n", s.Space, s.Model, s.Tenant, s.Dtype, s.Groups, s.Shards, s.Epoch, s.Engines, blocks)
	}
	return t.Flush()
}

func cacheRemoveCommand() *cobra.Command {
	s := &cacheSettings{}
	dry := false
	cmd := cacheBase(s, "rm", "Remove what is stored of some spaces", `Rm starts a new weights epoch of the spaces that --space, --model and --tenant pick, as a reset by an engine does: nothing
stored of them before is found again, in memory or in any tier, and their engines are told; other nodes that share a tier follow within
their --tier-epoch-every, and share again what is stored from then on. Memory is free at once; what tiers hold under the old name is
collected later (--tier-collect-after).

With --tier only what that tier holds of them is deleted there, for every agent that uses it; memory and other tiers keep what they have, and
blocks may be written to the tier again. --space then takes a name that ls --tier shows as well. All but Mooncake tiers can do that.`,
		func(cmd *cobra.Command, s *cacheSettings) error {
			switch {
			case s.space+s.model+s.tenant == "":
				return settings.Invalid(errors.New("nothing says what to remove, allowed: one or more of --space, --model, --tenant"))
			case s.tier == memoryTier:
				return settings.Invalid(errors.New("tier: memory, allowed: a tier below it; without --tier memory and all tiers forget"))
			case s.tier != "":
				return removeFromTier(cmd, s, dry)
			case dry:
				return wouldRemove(cmd, s)
			}
			return removeCache(cmd, s)
		})
	s.addFilter(cmd)
	s.addTier(cmd, "delete only what this tier holds")
	cmd.Flags().BoolVar(&dry, "dry-run", false, "only say what would be removed")
	return cmd
}

func wouldRemove(cmd *cobra.Command, s *cacheSettings) error {
	st, ok, err := askCache(cmd, s)
	if !ok {
		return err
	}
	fmt.Fprintf(cmd.OutOrStdout(), "would remove what is stored of %d spaces\n", len(st.Spaces))
	return printSpaces(cmd.OutOrStdout(), st.Spaces)
}

func removeCache(cmd *cobra.Command, s *cacheSettings) error {
	body, err := adminclient.New(*s.dir).Post(cmd.Context(), "/cache/rm"+s.query())
	if err != nil {
		return err
	}
	if s.asJSON {
		_, err = cmd.OutOrStdout().Write(body)
		return err
	}
	var removed agent.Removed
	if err := json.Unmarshal(body, &removed); err != nil {
		return fmt.Errorf("cache rm: %w", err)
	}
	fmt.Fprintf(cmd.OutOrStdout(), "removed what was stored of %d spaces\n", len(removed.Spaces))
	return printSpaces(cmd.OutOrStdout(), removed.Spaces)
}
