package adminclient

import (
	"errors"
	"fmt"
	"io"
	"net/url"
	"text/tabwriter"

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
  kvagent cache rm --tenant acme`,
	}
	cmd.AddCommand(cacheListCommand(), cacheRemoveCommand())
	return cmd
}

// spaceFilter picks spaces.
type spaceFilter struct{ space, model, tenant string }

func (f *spaceFilter) addFlags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.space, "space", "", "only the space with this fingerprint, or its first hex digits")
	cmd.Flags().StringVar(&f.model, "model", "", "only spaces of this model")
	cmd.Flags().StringVar(&f.tenant, "tenant", "", "only spaces of this tenant")
}

// query returns the parameters of a request.
func (f *spaceFilter) query() url.Values {
	q := url.Values{}
	for key, value := range map[string]string{"space": f.space, "model": f.model, "tenant": f.tenant} {
		if value != "" {
			q.Set(key, value)
		}
	}
	return q
}

const cacheListHelp = `Ls lists the spaces that engines registered since the agent started. A space is everything
besides the tokens that determines a block's bytes, such as model, data type and tenant, under one fingerprint.
The blocks shown are those in memory, of all ranks.`

func cacheListCommand() *cobra.Command {
	var f spaceFilter
	cmd := askCommand(&cobra.Command{
		Use: "ls", Short: "List the spaces an agent knows", Long: cacheListHelp,
	}, func(a *ask, _ []string) error {
		body, err := a.Get(a.Context(), "/cache?"+f.query().Encode())
		return show(a, body, err, func(out io.Writer, st *admin.CacheStatus) error {
			return printSpaces(out, st.Spaces)
		})
	})
	f.addFlags(cmd)
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
then on. Memory is free at once; what tiers hold under the old name is not read again.`

func cacheRemoveCommand() *cobra.Command {
	var f spaceFilter
	cmd := askCommand(&cobra.Command{
		Use: "rm", Short: "Remove what is stored of some spaces", Long: cacheRemoveHelp,
	}, func(a *ask, _ []string) error {
		if f == (spaceFilter{}) {
			return settings.Invalid(errors.New("no filter given, allowed: one or more of --space, --model, --tenant"))
		}
		body, err := a.Post(a.Context(), "/cache/rm?"+f.query().Encode(), nil)
		return show(a, body, err, func(out io.Writer, removed *admin.Removed) error {
			fmt.Fprintf(out, "removed what was stored of %d spaces\n", len(removed.Spaces))
			return printSpaces(out, removed.Spaces)
		})
	})
	f.addFlags(cmd)
	return cmd
}
