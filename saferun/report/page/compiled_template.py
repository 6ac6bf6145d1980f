"""The template of report.html as jinja2 compiles it.

Written by ``python -m tests.compile_page`` from ``template/page.html``: edit that.
"""

from jinja2.runtime import LoopContext, Macro, Markup, Namespace, TemplateNotFound, TemplateReference, TemplateRuntimeError, Undefined, escape, identity, internalcode, markup_join, missing, str_join
name = 'page.html'

def root(context, missing=missing):
    resolve = context.resolve_or_missing
    undefined = environment.undefined
    concat = environment.concat
    cond_expr_undefined = Undefined
    if 0: yield None
    l_0_page = resolve('page')
    l_0_digest = resolve('digest')
    l_0_style = resolve('style')
    l_0_phases = resolve('phases')
    l_0_now = resolve('now')
    l_0_data = resolve('data')
    l_0_script = resolve('script')
    l_0_chip = l_0_table = l_0_calls = l_0_branch = l_0_stack_views = l_0_pieces = l_0_graph_view = l_0_track = l_0_timeline_view = l_0_output_block = l_0_verdict_body = l_0_facts = l_0_machine_view = l_0_failure_view = l_0_calls_view = l_0_collectives_view = l_0_main = l_0_has_machine = l_0_start = missing
    try:
        t_1 = environment.filters['groupby']
    except KeyError:
        @internalcode
        def t_1(*unused):
            raise TemplateRuntimeError("No filter named 'groupby' found.")
    try:
        t_2 = environment.filters['int']
    except KeyError:
        @internalcode
        def t_2(*unused):
            raise TemplateRuntimeError("No filter named 'int' found.")
    try:
        t_3 = environment.filters['join']
    except KeyError:
        @internalcode
        def t_3(*unused):
            raise TemplateRuntimeError("No filter named 'join' found.")
    try:
        t_4 = environment.filters['length']
    except KeyError:
        @internalcode
        def t_4(*unused):
            raise TemplateRuntimeError("No filter named 'length' found.")
    try:
        t_5 = environment.filters['list']
    except KeyError:
        @internalcode
        def t_5(*unused):
            raise TemplateRuntimeError("No filter named 'list' found.")
    try:
        t_6 = environment.filters['map']
    except KeyError:
        @internalcode
        def t_6(*unused):
            raise TemplateRuntimeError("No filter named 'map' found.")
    try:
        t_7 = environment.filters['rejectattr']
    except KeyError:
        @internalcode
        def t_7(*unused):
            raise TemplateRuntimeError("No filter named 'rejectattr' found.")
    try:
        t_8 = environment.filters['round']
    except KeyError:
        @internalcode
        def t_8(*unused):
            raise TemplateRuntimeError("No filter named 'round' found.")
    try:
        t_9 = environment.filters['safe']
    except KeyError:
        @internalcode
        def t_9(*unused):
            raise TemplateRuntimeError("No filter named 'safe' found.")
    try:
        t_10 = environment.filters['select']
    except KeyError:
        @internalcode
        def t_10(*unused):
            raise TemplateRuntimeError("No filter named 'select' found.")
    try:
        t_11 = environment.filters['selectattr']
    except KeyError:
        @internalcode
        def t_11(*unused):
            raise TemplateRuntimeError("No filter named 'selectattr' found.")
    try:
        t_12 = environment.filters['string']
    except KeyError:
        @internalcode
        def t_12(*unused):
            raise TemplateRuntimeError("No filter named 'string' found.")
    try:
        t_13 = environment.filters['sum']
    except KeyError:
        @internalcode
        def t_13(*unused):
            raise TemplateRuntimeError("No filter named 'sum' found.")
    try:
        t_14 = environment.filters['unique']
    except KeyError:
        @internalcode
        def t_14(*unused):
            raise TemplateRuntimeError("No filter named 'unique' found.")
    pass
    def macro(l_1_label, l_1_ranks_of, l_1_odd):
        t_15 = []
        l_1_ranks = resolve('ranks')
        if l_1_label is missing:
            l_1_label = undefined("parameter 'label' was not provided", name='label')
        if l_1_ranks_of is missing:
            l_1_ranks_of = undefined("parameter 'ranks_of' was not provided", name='ranks_of')
        if l_1_odd is missing:
            l_1_odd = False
        pass
        t_15.extend((
            '<span class="chip',
            escape((' root' if l_1_odd else cond_expr_undefined("the inline if-expression on line 2 in 'page.html' evaluated to false and no else section was defined."))),
            '" data-ranks="',
            escape(context.call((undefined(name='ranks') if l_1_ranks is missing else l_1_ranks), l_1_ranks_of)),
            '">',
            escape(l_1_label),
            '</span>',
        ))
        return concat(t_15)
    context.exported_vars.add('chip')
    context.vars['chip'] = l_0_chip = Macro(environment, macro, 'chip', ('label', 'ranks_of', 'odd'), False, False, False, context.eval_ctx.autoescape)
    def macro(l_1_one, l_1_id, l_1_css):
        t_16 = []
        if l_1_one is missing:
            l_1_one = undefined("parameter 'one' was not provided", name='one')
        if l_1_id is missing:
            l_1_id = ''
        if l_1_css is missing:
            l_1_css = ''
        pass
        t_16.extend((
            '<div class="scroll" role="region" tabindex="0" aria-label="',
            escape(environment.getattr(l_1_one, 'caption')),
            '">\n<table class="',
            escape(l_1_css),
            '"',
        ))
        if l_1_id:
            pass
            t_16.extend((
                ' id="',
                escape(l_1_id),
                '"',
            ))
        t_16.extend((
            '>\n<caption>',
            escape(environment.getattr(l_1_one, 'caption')),
            '</caption>\n<thead><tr>',
        ))
        for l_2_name in environment.getattr(l_1_one, 'head'):
            _loop_vars = {}
            pass
            t_16.extend((
                '<th scope="col">',
                escape(l_2_name),
                '</th>',
            ))
        l_2_name = missing
        t_16.append(
            '</tr></thead>\n<tbody>\n',
        )
        l_2_loop = missing
        for l_2_row, l_2_loop in LoopContext(environment.getattr(l_1_one, 'rows'), undefined):
            _loop_vars = {}
            pass
            t_16.append(
                '<tr',
            )
            if (environment.getattr(l_2_loop, 'index0') in environment.getattr(l_1_one, 'odd')):
                pass
                t_16.append(
                    ' class="odd"',
                )
            t_16.append(
                '>',
            )
            l_3_loop = missing
            for l_3_cell, l_3_loop in LoopContext(l_2_row, undefined):
                _loop_vars = {}
                pass
                if environment.getattr(l_3_loop, 'first'):
                    pass
                    t_16.append(
                        '<th scope="row">',
                    )
                    if (environment.getattr(l_3_loop, 'first') and (l_3_cell in ('fail', 'warn', 'ok', 'skipped'))):
                        pass
                        t_16.extend((
                            '<span class="badge ',
                            escape(l_3_cell),
                            '">',
                            escape(l_3_cell),
                            '</span>',
                        ))
                    else:
                        pass
                        t_16.append(
                            escape(l_3_cell),
                        )
                    t_16.append(
                        '</th>',
                    )
                else:
                    pass
                    t_16.extend((
                        '<td>',
                        escape(l_3_cell),
                        '</td>',
                    ))
            l_3_loop = l_3_cell = missing
            t_16.append(
                '</tr>\n',
            )
        l_2_loop = l_2_row = missing
        t_16.append(
            '</tbody>\n</table>\n</div>\n',
        )
        if environment.getattr(l_1_one, 'note'):
            pass
            t_16.extend((
                '<p class="note">',
                escape(environment.getattr(l_1_one, 'note')),
                '</p>',
            ))
        return concat(t_16)
    context.exported_vars.add('table')
    context.vars['table'] = l_0_table = Macro(environment, macro, 'table', ('one', 'id', 'css'), False, False, False, context.eval_ctx.autoescape)
    def macro(l_1_list):
        t_17 = []
        if l_1_list is missing:
            l_1_list = undefined("parameter 'list' was not provided", name='list')
        pass
        t_17.append(
            '<ol class="calls">\n',
        )
        for l_2_call in l_1_list:
            _loop_vars = {}
            pass
            t_17.extend((
                '<li class="',
                escape(('user' if environment.getattr(l_2_call, 'is_user') else ('native' if environment.getattr(l_2_call, 'is_native') else 'library'))),
                '"><code>',
                escape(environment.getattr(l_2_call, 'function')),
                '</code> <span class="place" title="',
                escape(environment.getattr(l_2_call, 'file')),
                '">',
                escape(environment.getattr(l_2_call, 'location')),
                escape((' [native]' if environment.getattr(l_2_call, 'is_native') else cond_expr_undefined("the inline if-expression on line 23 in 'page.html' evaluated to false and no else section was defined."))),
                '</span></li>\n',
            ))
        l_2_call = missing
        t_17.append(
            '</ol>',
        )
        return concat(t_17)
    context.exported_vars.add('calls')
    context.vars['calls'] = l_0_calls = Macro(environment, macro, 'calls', ('list',), False, False, False, context.eval_ctx.autoescape)
    def macro(l_1_stacks, l_1_index):
        t_18 = []
        l_1_one = l_1_last = missing
        if l_1_stacks is missing:
            l_1_stacks = undefined("parameter 'stacks' was not provided", name='stacks')
        if l_1_index is missing:
            l_1_index = undefined("parameter 'index' was not provided", name='index')
        pass
        l_1_one = environment.getitem(environment.getattr(l_1_stacks, 'branches'), l_1_index)
        l_1_last = (environment.getitem(environment.getattr((undefined(name='one') if l_1_one is missing else l_1_one), 'calls'), (-1)) if environment.getattr((undefined(name='one') if l_1_one is missing else l_1_one), 'calls') else None)
        t_18.extend((
            '<li>\n<details',
            escape((' open' if ((environment.getattr((undefined(name='one') if l_1_one is missing else l_1_one), 'is_culprit') or environment.getattr((undefined(name='one') if l_1_one is missing else l_1_one), 'children')) or (t_4(environment.getattr(l_1_stacks, 'branches')) < 13)) else cond_expr_undefined("the inline if-expression on line 32 in 'page.html' evaluated to false and no else section was defined."))),
            ' class="branch',
            escape((' root' if environment.getattr((undefined(name='one') if l_1_one is missing else l_1_one), 'is_culprit') else cond_expr_undefined("the inline if-expression on line 32 in 'page.html' evaluated to false and no else section was defined."))),
            '">\n<summary>',
            escape(context.call((undefined(name='chip') if l_0_chip is missing else l_0_chip), environment.getattr((undefined(name='one') if l_1_one is missing else l_1_one), 'label'), environment.getattr((undefined(name='one') if l_1_one is missing else l_1_one), 'ranks'), environment.getattr((undefined(name='one') if l_1_one is missing else l_1_one), 'is_culprit'))),
            ' ',
        ))
        if (undefined(name='last') if l_1_last is missing else l_1_last):
            pass
            t_18.extend((
                '<code>',
                escape(environment.getattr((undefined(name='last') if l_1_last is missing else l_1_last), 'function')),
                '</code> <span class="place">',
                escape(environment.getattr((undefined(name='last') if l_1_last is missing else l_1_last), 'location')),
                '</span>',
            ))
        else:
            pass
            t_18.append(
                '<span class="place">in that call itself</span>',
            )
        if (t_4(environment.getattr((undefined(name='one') if l_1_one is missing else l_1_one), 'calls')) > 1):
            pass
            t_18.extend((
                ' <span class="count">',
                escape(t_4(environment.getattr((undefined(name='one') if l_1_one is missing else l_1_one), 'calls'))),
                ' calls</span>',
            ))
        t_18.append(
            '</summary>\n',
        )
        if environment.getattr((undefined(name='one') if l_1_one is missing else l_1_one), 'omitted'):
            pass
            t_18.extend((
                '<p class="note">',
                escape(environment.getattr((undefined(name='one') if l_1_one is missing else l_1_one), 'omitted')),
                ' outer calls not shown</p>',
            ))
        if (t_4(environment.getattr((undefined(name='one') if l_1_one is missing else l_1_one), 'calls')) > 1):
            pass
            t_18.append(
                escape(context.call((undefined(name='calls') if l_0_calls is missing else l_0_calls), environment.getattr((undefined(name='one') if l_1_one is missing else l_1_one), 'calls'))),
            )
        if environment.getattr((undefined(name='one') if l_1_one is missing else l_1_one), 'children'):
            pass
            t_18.append(
                '<ul class="tree">\n',
            )
            for l_2_child in environment.getattr((undefined(name='one') if l_1_one is missing else l_1_one), 'children'):
                _loop_vars = {}
                pass
                t_18.extend((
                    escape(context.call((undefined(name='branch') if l_0_branch is missing else l_0_branch), l_1_stacks, l_2_child, _loop_vars=_loop_vars)),
                    '\n',
                ))
            l_2_child = missing
            t_18.append(
                '</ul>\n',
            )
        t_18.append(
            '</details>\n</li>',
        )
        return concat(t_18)
    context.exported_vars.add('branch')
    context.vars['branch'] = l_0_branch = Macro(environment, macro, 'branch', ('stacks', 'index'), False, False, False, context.eval_ctx.autoescape)
    def macro(l_1_stacks, l_1_name):
        t_19 = []
        if l_1_stacks is missing:
            l_1_stacks = undefined("parameter 'stacks' was not provided", name='stacks')
        if l_1_name is missing:
            l_1_name = undefined("parameter 'name' was not provided", name='name')
        pass
        t_19.append(
            '<div class="views">\n<div>\n<h3>As a tree</h3>\n<p class="note">Outermost calls first. The tree branches where ranks differ.</p>\n<ul class="tree top">\n',
        )
        for l_2_root in environment.getattr(l_1_stacks, 'roots'):
            _loop_vars = {}
            pass
            t_19.extend((
                escape(context.call((undefined(name='branch') if l_0_branch is missing else l_0_branch), l_1_stacks, l_2_root, _loop_vars=_loop_vars)),
                '\n',
            ))
        l_2_root = missing
        t_19.append(
            '</ul>\n',
        )
        if environment.getattr(l_1_stacks, 'omitted'):
            pass
            t_19.extend((
                '<p class="note">',
                escape(environment.getattr(l_1_stacks, 'omitted')),
                ' more branches not shown.</p>',
            ))
        t_19.append(
            '</div>\n',
        )
        if environment.getattr(l_1_stacks, 'flame'):
            pass
            t_19.extend((
                '<div>\n<h3>As a flame view</h3>\n<p class="note">A box is as wide as the number of ranks in that call. <span class="with-script">Click a box to enlarge it.</span></p>\n<div class="flame" role="img" aria-label="Flame view of the stacks; the tree has the same as text" style="height:',
                escape((environment.getattr(l_1_stacks, 'flame_levels') * 21)),
                'px">\n',
            ))
            for l_2_box in environment.getattr(l_1_stacks, 'flame'):
                l_2_level_share = resolve('level_share')
                _loop_vars = {}
                pass
                t_19.extend((
                    '<span class="box ',
                    escape(environment.getattr(l_2_box, 'tone')),
                    '" style="left:',
                    escape(context.call((undefined(name='level_share') if l_2_level_share is missing else l_2_level_share), l_1_stacks, environment.getattr(l_2_box, 'offset'), _loop_vars=_loop_vars)),
                    '%;width:',
                    escape(context.call((undefined(name='level_share') if l_2_level_share is missing else l_2_level_share), l_1_stacks, environment.getattr(l_2_box, 'width'), _loop_vars=_loop_vars)),
                    '%;top:',
                    escape((environment.getattr(l_2_box, 'level') * 21)),
                    'px" title="',
                    escape(environment.getattr(l_2_box, 'title')),
                    '">',
                    escape(environment.getattr(l_2_box, 'name')),
                    '</span>\n',
                ))
            l_2_box = l_2_level_share = missing
            t_19.append(
                '</div>\n</div>\n',
            )
        t_19.append(
            '</div>',
        )
        return concat(t_19)
    context.exported_vars.add('stack_views')
    context.vars['stack_views'] = l_0_stack_views = Macro(environment, macro, 'stack_views', ('stacks', 'name'), False, False, False, context.eval_ctx.autoescape)
    def macro(l_1_list, l_1_open):
        t_20 = []
        if l_1_list is missing:
            l_1_list = undefined("parameter 'list' was not provided", name='list')
        if l_1_open is missing:
            l_1_open = ''
        pass
        l_2_loop = missing
        for l_2_piece, l_2_loop in LoopContext(l_1_list, undefined):
            _loop_vars = {}
            pass
            if environment.getattr(l_2_piece, 'summary'):
                pass
                t_20.extend((
                    '<details class="traceback"',
                    escape((' open' if (((l_1_open == 'last') and environment.getattr(l_2_loop, 'last')) or ((l_1_open == 'first') and environment.getattr(l_2_loop, 'first'))) else cond_expr_undefined("the inline if-expression on line 76 in 'page.html' evaluated to false and no else section was defined."))),
                    '><summary>',
                    escape(environment.getattr(l_2_piece, 'summary')),
                    '</summary><pre>',
                    escape(t_3(context.eval_ctx, environment.getattr(l_2_piece, 'lines'), '\n')),
                    '</pre></details>\n',
                ))
            else:
                pass
                t_20.extend((
                    '<pre>',
                    escape(t_3(context.eval_ctx, environment.getattr(l_2_piece, 'lines'), '\n')),
                    '</pre>\n',
                ))
        l_2_loop = l_2_piece = missing
        return concat(t_20)
    context.exported_vars.add('pieces')
    context.vars['pieces'] = l_0_pieces = Macro(environment, macro, 'pieces', ('list', 'open'), False, False, False, context.eval_ctx.autoescape)
    def macro(l_1_graph, l_1_number):
        t_21 = []
        if l_1_graph is missing:
            l_1_graph = undefined("parameter 'graph' was not provided", name='graph')
        if l_1_number is missing:
            l_1_number = undefined("parameter 'number' was not provided", name='number')
        pass
        t_21.extend((
            '<figure class="graph">\n<div class="scroll" role="region" tabindex="0" aria-label="Graph of the groups that wait">\n<svg viewBox="0 0 ',
            escape(t_2(t_8(environment.getattr(l_1_graph, 'width')))),
            ' ',
            escape(t_2(t_8(environment.getattr(l_1_graph, 'height')))),
            '" width="',
            escape(t_2(t_8(environment.getattr(l_1_graph, 'width')))),
            '" height="',
            escape(t_2(t_8(environment.getattr(l_1_graph, 'height')))),
            '" role="img" aria-labelledby="graph-title-',
            escape(l_1_number),
            '">\n<title id="graph-title-',
            escape(l_1_number),
            '">Who waits for whom; an arrow leads to the ranks that are waited for. The list below has the same as text.</title>\n<defs><marker id="arrow-',
            escape(l_1_number),
            '" viewBox="0 0 8 8" refX="1" refY="4" markerWidth="8" markerHeight="8" orient="auto-start-reverse"><path class="arrowhead" d="M0 0L8 4L0 8z"/></marker></defs>\n',
        ))
        for l_2_edge in environment.getattr(l_1_graph, 'edges'):
            _loop_vars = {}
            pass
            t_21.extend((
                '<path class="edge" d="',
                escape(environment.getattr(l_2_edge, 'path')),
                '" marker-end="url(#arrow-',
                escape(l_1_number),
                ')"/>\n',
            ))
        l_2_edge = missing
        def t_22(fiter):
            for l_2_edge in fiter:
                if (t_4(environment.getattr(l_1_graph, 'edges')) < 16):
                    yield l_2_edge
        for l_2_edge in t_22(environment.getattr(l_1_graph, 'edges')):
            _loop_vars = {}
            pass
            t_21.extend((
                '<text class="edge-label" x="',
                escape(t_2(t_8(environment.getattr(l_2_edge, 'label_x')))),
                '" y="',
                escape(t_2(t_8(environment.getattr(l_2_edge, 'label_y')))),
                '" text-anchor="middle">',
                escape(environment.getattr(l_2_edge, 'label')),
                '</text>\n',
            ))
        l_2_edge = missing
        for l_2_node in environment.getattr(l_1_graph, 'nodes'):
            _loop_vars = {}
            pass
            t_21.extend((
                '<g class="node',
                escape((' root' if environment.getattr(l_2_node, 'is_root') else cond_expr_undefined("the inline if-expression on line 96 in 'page.html' evaluated to false and no else section was defined."))),
                '">\n<rect x="',
                escape(t_2(t_8(environment.getattr(l_2_node, 'x')))),
                '" y="',
                escape(t_2(t_8(environment.getattr(l_2_node, 'y')))),
                '" width="',
                escape(t_2(t_8(environment.getattr(l_2_node, 'width')))),
                '" height="',
                escape(t_2(t_8(environment.getattr(l_2_node, 'height')))),
                '" rx="6"/>\n<text class="label" x="',
                escape((t_2(t_8(environment.getattr(l_2_node, 'x'))) + 12)),
                '" y="',
                escape((t_2(t_8(environment.getattr(l_2_node, 'y'))) + 21)),
                '">',
                escape(environment.getattr(l_2_node, 'label')),
                escape((' — cause' if environment.getattr(l_2_node, 'is_root') else cond_expr_undefined("the inline if-expression on line 98 in 'page.html' evaluated to false and no else section was defined."))),
                '</text>\n<text x="',
                escape((t_2(t_8(environment.getattr(l_2_node, 'x'))) + 12)),
                '" y="',
                escape((t_2(t_8(environment.getattr(l_2_node, 'y'))) + 40)),
                '">',
                escape(environment.getattr(l_2_node, 'detail')),
                '</text>\n<text class="dim" x="',
                escape((t_2(t_8(environment.getattr(l_2_node, 'x'))) + 12)),
                '" y="',
                escape((t_2(t_8(environment.getattr(l_2_node, 'y'))) + 56)),
                '">',
                escape(environment.getattr(l_2_node, 'location')),
                '</text>\n</g>\n',
            ))
        l_2_node = missing
        t_21.append(
            '</svg>\n</div>\n<figcaption>\n<ul>\n',
        )
        for l_2_edge in environment.getattr(l_1_graph, 'edges'):
            _loop_vars = {}
            pass
            t_21.extend((
                '<li>',
                escape(environment.getattr(l_2_edge, 'text')),
                '</li>\n',
            ))
        l_2_edge = missing
        t_21.append(
            '</ul>\n',
        )
        if environment.getattr(l_1_graph, 'note'):
            pass
            t_21.extend((
                '<p class="note">',
                escape(environment.getattr(l_1_graph, 'note')),
                '</p>',
            ))
        t_21.append(
            '</figcaption>\n</figure>',
        )
        return concat(t_21)
    context.exported_vars.add('graph_view')
    context.vars['graph_view'] = l_0_graph_view = Macro(environment, macro, 'graph_view', ('graph', 'number'), False, False, False, context.eval_ctx.autoescape)
    def macro(l_1_timeline, l_1_row, l_1_start):
        t_23 = []
        if l_1_timeline is missing:
            l_1_timeline = undefined("parameter 'timeline' was not provided", name='timeline')
        if l_1_row is missing:
            l_1_row = undefined("parameter 'row' was not provided", name='row')
        if l_1_start is missing:
            l_1_start = undefined("parameter 'start' was not provided", name='start')
        pass
        t_23.extend((
            '<li class="row',
            escape((' root' if environment.getattr(l_1_row, 'is_culprit') else cond_expr_undefined("the inline if-expression on line 117 in 'page.html' evaluated to false and no else section was defined."))),
            '">\n<div class="who">',
            escape(context.call((undefined(name='chip') if l_0_chip is missing else l_0_chip), environment.getattr(l_1_row, 'label'), environment.getattr(l_1_row, 'ranks'), environment.getattr(l_1_row, 'is_culprit'))),
            ' ',
        ))
        if environment.getattr(l_1_row, 'steps'):
            pass
            t_23.extend((
                '<span class="at-step">',
                escape(environment.getattr(l_1_row, 'steps')),
                '</span> ',
            ))
        t_23.extend((
            '<span class="place">',
            escape(environment.getattr(l_1_row, 'where')),
            '</span></div>\n<div class="track" aria-hidden="true">\n',
        ))
        def t_24(fiter):
            for l_2_mark in fiter:
                if (environment.getattr(l_2_mark, 'kind') in ('hang', 'signal', 'abort', 'again')):
                    yield l_2_mark
        for l_2_mark in t_24(environment.getattr(l_1_timeline, 'marks')):
            l_2_percent = resolve('percent')
            _loop_vars = {}
            pass
            t_23.extend((
                '<i class="line ',
                escape(environment.getattr(l_2_mark, 'kind')),
                '" style="left:',
                escape(context.call((undefined(name='percent') if l_2_percent is missing else l_2_percent), l_1_timeline, environment.getattr(l_2_mark, 'time'), _loop_vars=_loop_vars)),
                '%"></i>',
            ))
        l_2_mark = l_2_percent = missing
        for l_2_one in environment.getattr(l_1_row, 'segments'):
            l_2_percent = resolve('percent')
            l_2_moment = resolve('moment')
            _loop_vars = {}
            pass
            t_23.extend((
                '<span class="phase ',
                escape(environment.getattr(l_2_one, 'kind')),
                '" style="left:',
                escape(context.call((undefined(name='percent') if l_2_percent is missing else l_2_percent), l_1_timeline, environment.getattr(l_2_one, 'start'), _loop_vars=_loop_vars)),
                '%;right:calc(100% - ',
                escape(context.call((undefined(name='percent') if l_2_percent is missing else l_2_percent), l_1_timeline, environment.getattr(l_2_one, 'end'), _loop_vars=_loop_vars)),
                '%)" title="',
                escape(context.call(environment.getattr((undefined(name='phases') if l_0_phases is missing else l_0_phases), 'get'), environment.getattr(l_2_one, 'kind'), '', _loop_vars=_loop_vars)),
                ', ',
                escape(context.call((undefined(name='moment') if l_2_moment is missing else l_2_moment), l_1_timeline, environment.getattr(l_2_one, 'start'), l_1_start, _loop_vars=_loop_vars)),
                ' to ',
                escape(context.call((undefined(name='moment') if l_2_moment is missing else l_2_moment), l_1_timeline, environment.getattr(l_2_one, 'end'), l_1_start, _loop_vars=_loop_vars)),
                '"></span>',
            ))
        l_2_one = l_2_percent = l_2_moment = missing
        for l_2_mark in environment.getattr(l_1_row, 'marks'):
            l_2_percent = resolve('percent')
            l_2_moment = resolve('moment')
            _loop_vars = {}
            pass
            t_23.extend((
                '<span class="mark ',
                escape(environment.getattr(l_2_mark, 'kind')),
                '" style="left:',
                escape(context.call((undefined(name='percent') if l_2_percent is missing else l_2_percent), l_1_timeline, environment.getattr(l_2_mark, 'time'), _loop_vars=_loop_vars)),
                '%" title="',
                escape(environment.getattr(l_2_mark, 'text')),
                ', ',
                escape(context.call((undefined(name='moment') if l_2_moment is missing else l_2_moment), l_1_timeline, environment.getattr(l_2_mark, 'time'), l_1_start, _loop_vars=_loop_vars)),
                '"></span>',
            ))
        l_2_mark = l_2_percent = l_2_moment = missing
        t_23.append(
            '</div>\n<p class="hidden">',
        )
        for l_2_one in environment.getattr(l_1_row, 'segments'):
            l_2_moment = resolve('moment')
            _loop_vars = {}
            pass
            t_23.extend((
                escape(context.call(environment.getattr((undefined(name='phases') if l_0_phases is missing else l_0_phases), 'get'), environment.getattr(l_2_one, 'kind'), '', _loop_vars=_loop_vars)),
                ' from ',
                escape(context.call((undefined(name='moment') if l_2_moment is missing else l_2_moment), l_1_timeline, environment.getattr(l_2_one, 'start'), l_1_start, _loop_vars=_loop_vars)),
                ' to ',
                escape(context.call((undefined(name='moment') if l_2_moment is missing else l_2_moment), l_1_timeline, environment.getattr(l_2_one, 'end'), l_1_start, _loop_vars=_loop_vars)),
                '; ',
            ))
        l_2_one = l_2_moment = missing
        for l_2_mark in environment.getattr(l_1_row, 'marks'):
            l_2_moment = resolve('moment')
            _loop_vars = {}
            pass
            t_23.extend((
                escape(environment.getattr(l_2_mark, 'text')),
                ' at ',
                escape(context.call((undefined(name='moment') if l_2_moment is missing else l_2_moment), l_1_timeline, environment.getattr(l_2_mark, 'time'), l_1_start, _loop_vars=_loop_vars)),
                '. ',
            ))
        l_2_mark = l_2_moment = missing
        t_23.append(
            '</p>\n</li>',
        )
        return concat(t_23)
    context.exported_vars.add('track')
    context.vars['track'] = l_0_track = Macro(environment, macro, 'track', ('timeline', 'row', 'start'), False, False, False, context.eval_ctx.autoescape)
    def macro(l_1_timeline, l_1_start, l_1_name):
        t_25 = []
        l_1_ticks = resolve('ticks')
        if l_1_timeline is missing:
            l_1_timeline = undefined("parameter 'timeline' was not provided", name='timeline')
        if l_1_start is missing:
            l_1_start = undefined("parameter 'start' was not provided", name='start')
        if l_1_name is missing:
            l_1_name = undefined("parameter 'name' was not provided", name='name')
        pass
        t_25.extend((
            '<figure class="timeline" aria-label="',
            escape(l_1_name),
            '">\n<div class="axis" aria-hidden="true"><div class="track">',
        ))
        for l_2_tick in context.call((undefined(name='ticks') if l_1_ticks is missing else l_1_ticks), l_1_timeline, l_1_start):
            l_2_percent = resolve('percent')
            _loop_vars = {}
            pass
            t_25.extend((
                '<span class="tick" style="left:',
                escape(context.call((undefined(name='percent') if l_2_percent is missing else l_2_percent), l_1_timeline, environment.getattr(l_2_tick, 'at'), _loop_vars=_loop_vars)),
                '%">',
                escape(environment.getattr(l_2_tick, 'text')),
                '</span>',
            ))
        l_2_tick = l_2_percent = missing
        t_25.append(
            '</div></div>\n',
        )
        for (l_2_attempt, l_2_rows) in t_1(environment, environment.getattr(l_1_timeline, 'rows'), 'attempt'):
            _loop_vars = {}
            pass
            if (t_4(t_5(context.eval_ctx, t_14(environment, t_6(context, environment.getattr(environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'timeline'), 'rows'), attribute='attempt')))) > 1):
                pass
                t_25.extend((
                    '<h4>Attempt ',
                    escape(l_2_attempt),
                    '</h4>',
                ))
            t_25.append(
                '<ul class="rows">\n',
            )
            for l_3_row in l_2_rows:
                _loop_vars = {}
                pass
                t_25.extend((
                    escape(context.call((undefined(name='track') if l_0_track is missing else l_0_track), l_1_timeline, l_3_row, l_1_start, _loop_vars=_loop_vars)),
                    '\n',
                ))
            l_3_row = missing
            t_25.append(
                '</ul>\n',
            )
        l_2_attempt = l_2_rows = missing
        if environment.getattr(l_1_timeline, 'marks'):
            pass
            t_25.append(
                '<figcaption><ul class="marks">\n',
            )
            for l_2_mark in environment.getattr(l_1_timeline, 'marks'):
                l_2_moment = resolve('moment')
                _loop_vars = {}
                pass
                t_25.extend((
                    '<li><span class="mark ',
                    escape(environment.getattr(l_2_mark, 'kind')),
                    '" aria-hidden="true"></span><span class="when">',
                    escape(context.call((undefined(name='moment') if l_2_moment is missing else l_2_moment), l_1_timeline, environment.getattr(l_2_mark, 'time'), l_1_start, _loop_vars=_loop_vars)),
                    '</span> ',
                    escape(environment.getattr(l_2_mark, 'text')),
                    '</li>\n',
                ))
            l_2_mark = l_2_moment = missing
            t_25.append(
                '</ul></figcaption>\n',
            )
        if environment.getattr(l_1_timeline, 'note'):
            pass
            t_25.extend((
                '<p class="note">',
                escape(environment.getattr(l_1_timeline, 'note')),
                '</p>',
            ))
        t_25.append(
            '</figure>',
        )
        return concat(t_25)
    context.exported_vars.add('timeline_view')
    context.vars['timeline_view'] = l_0_timeline_view = Macro(environment, macro, 'timeline_view', ('timeline', 'start', 'name'), False, False, False, context.eval_ctx.autoescape)
    def macro(l_1_block, l_1_open):
        t_26 = []
        if l_1_block is missing:
            l_1_block = undefined("parameter 'block' was not provided", name='block')
        if l_1_open is missing:
            l_1_open = undefined("parameter 'open' was not provided", name='open')
        pass
        t_26.extend((
            '<details class="out"',
            escape((' open' if (environment.getattr(l_1_block, 'is_culprit') or l_1_open) else cond_expr_undefined("the inline if-expression on line 151 in 'page.html' evaluated to false and no else section was defined."))),
            '>\n<summary>',
            escape(context.call((undefined(name='chip') if l_0_chip is missing else l_0_chip), environment.getattr(l_1_block, 'label'), environment.getattr(l_1_block, 'ranks'), environment.getattr(l_1_block, 'is_culprit'))),
            ' <span class="stream">',
            escape(environment.getattr(l_1_block, 'stream')),
            '</span> <span class="place">',
            escape(environment.getattr(l_1_block, 'where')),
            '</span> <span class="count">',
            escape(environment.getattr(l_1_block, 'lines')),
            ' line',
            escape(('s' if (environment.getattr(l_1_block, 'lines') != 1) else cond_expr_undefined("the inline if-expression on line 152 in 'page.html' evaluated to false and no else section was defined."))),
            escape(((', ' + environment.getattr(l_1_block, 'omitted')) if environment.getattr(l_1_block, 'omitted') else cond_expr_undefined("the inline if-expression on line 152 in 'page.html' evaluated to false and no else section was defined."))),
            '</span></summary>\n',
            escape(context.call((undefined(name='pieces') if l_0_pieces is missing else l_0_pieces), environment.getattr(l_1_block, 'pieces'), ('last' if environment.getattr(l_1_block, 'is_culprit') else ''))),
            '\n</details>',
        ))
        return concat(t_26)
    context.exported_vars.add('output_block')
    context.vars['output_block'] = l_0_output_block = Macro(environment, macro, 'output_block', ('block', 'open'), False, False, False, context.eval_ctx.autoescape)
    def macro(l_1_verdict):
        t_27 = []
        if l_1_verdict is missing:
            l_1_verdict = undefined("parameter 'verdict' was not provided", name='verdict')
        pass
        if environment.getattr(l_1_verdict, 'proof'):
            pass
            t_27.extend((
                '<dl class="proof"><dt>Proof</dt><dd>',
                escape(environment.getattr(l_1_verdict, 'proof')),
                '</dd></dl>',
            ))
        if environment.getattr(l_1_verdict, 'hints'):
            pass
            t_27.append(
                '<dl class="hint"><dt>What to do</dt>',
            )
            for l_2_hint in environment.getattr(l_1_verdict, 'hints'):
                _loop_vars = {}
                pass
                t_27.extend((
                    '<dd>',
                    escape(l_2_hint),
                    '</dd>',
                ))
            l_2_hint = missing
            t_27.append(
                '</dl>',
            )
        if environment.getattr(l_1_verdict, 'lines'):
            pass
            t_27.append(
                '<ul class="findings">',
            )
            for l_2_line in environment.getattr(l_1_verdict, 'lines'):
                _loop_vars = {}
                pass
                t_27.extend((
                    '<li>',
                    escape(l_2_line),
                    '</li>',
                ))
            l_2_line = missing
            t_27.append(
                '</ul>',
            )
        return concat(t_27)
    context.exported_vars.add('verdict_body')
    context.vars['verdict_body'] = l_0_verdict_body = Macro(environment, macro, 'verdict_body', ('verdict',), False, False, False, context.eval_ctx.autoescape)
    def macro(l_1_list):
        t_28 = []
        if l_1_list is missing:
            l_1_list = undefined("parameter 'list' was not provided", name='list')
        pass
        t_28.append(
            '<dl class="facts">',
        )
        for l_2_fact in l_1_list:
            _loop_vars = {}
            pass
            t_28.extend((
                '<div><dt>',
                escape(environment.getattr(l_2_fact, 'name')),
                '</dt><dd>',
                escape(environment.getattr(l_2_fact, 'value')),
                '</dd></div>',
            ))
        l_2_fact = missing
        t_28.append(
            '</dl>',
        )
        return concat(t_28)
    context.exported_vars.add('facts')
    context.vars['facts'] = l_0_facts = Macro(environment, macro, 'facts', ('list',), False, False, False, context.eval_ctx.autoescape)
    def macro(l_1_incident):
        t_29 = []
        if l_1_incident is missing:
            l_1_incident = undefined("parameter 'incident' was not provided", name='incident')
        pass
        if environment.getattr(l_1_incident, 'host_status'):
            pass
            t_29.extend((
                '<h3>GPUs and fabrics</h3><pre class="lines">',
                escape(t_3(context.eval_ctx, environment.getattr(l_1_incident, 'host_status'), '\n')),
                '</pre>',
            ))
        if environment.getattr(l_1_incident, 'gpus'):
            pass
            t_29.append(
                escape(context.call((undefined(name='table') if l_0_table is missing else l_0_table), environment.getattr(l_1_incident, 'gpus'))),
            )
        if environment.getattr(l_1_incident, 'kernel_log'):
            pass
            t_29.extend((
                '<h3>Kernel log</h3><pre class="lines">',
                escape(t_3(context.eval_ctx, environment.getattr(l_1_incident, 'kernel_log'), '\n')),
                '</pre>',
            ))
        if environment.getattr(l_1_incident, 'cores'):
            pass
            t_29.append(
                '<h3>Cores</h3>\n',
            )
            l_2_loop = missing
            for (l_2_text, l_2_list), l_2_loop in LoopContext(environment.getattr(l_1_incident, 'cores'), undefined):
                _loop_vars = {}
                pass
                t_29.extend((
                    '<details class="core"',
                    escape((' open' if environment.getattr(l_2_loop, 'first') else cond_expr_undefined("the inline if-expression on line 173 in 'page.html' evaluated to false and no else section was defined."))),
                    '><summary>',
                    escape(l_2_text),
                    '</summary>',
                ))
                if l_2_list:
                    pass
                    t_29.extend((
                        '<p class="note">Innermost call first.</p>',
                        escape(context.call((undefined(name='calls') if l_0_calls is missing else l_0_calls), l_2_list, _loop_vars=_loop_vars)),
                    ))
                t_29.append(
                    '</details>\n',
                )
            l_2_loop = l_2_text = l_2_list = missing
        for l_2_one in environment.getattr(l_1_incident, 'machine'):
            _loop_vars = {}
            pass
            t_29.append(
                escape(context.call((undefined(name='table') if l_0_table is missing else l_0_table), l_2_one, _loop_vars=_loop_vars)),
            )
        l_2_one = missing
        if environment.getattr(l_1_incident, 'captures'):
            pass
            t_29.append(
                '<h3>What could not be captured</h3><ul class="findings">',
            )
            for l_2_line in environment.getattr(l_1_incident, 'captures'):
                _loop_vars = {}
                pass
                t_29.extend((
                    '<li>',
                    escape(l_2_line),
                    '</li>',
                ))
            l_2_line = missing
            t_29.append(
                '</ul>',
            )
        return concat(t_29)
    context.exported_vars.add('machine_view')
    context.vars['machine_view'] = l_0_machine_view = Macro(environment, macro, 'machine_view', ('incident',), False, False, False, context.eval_ctx.autoescape)
    def macro(l_1_one, l_1_open):
        t_30 = []
        if l_1_one is missing:
            l_1_one = undefined("parameter 'one' was not provided", name='one')
        if l_1_open is missing:
            l_1_open = undefined("parameter 'open' was not provided", name='open')
        pass
        t_30.extend((
            '<details class="record"',
            escape((' open' if l_1_open else cond_expr_undefined("the inline if-expression on line 181 in 'page.html' evaluated to false and no else section was defined."))),
            '>\n<summary>',
            escape(context.call((undefined(name='chip') if l_0_chip is missing else l_0_chip), environment.getattr(l_1_one, 'label'), environment.getattr(l_1_one, 'ranks'), environment.getattr(l_1_one, 'is_culprit'))),
            ' <span class="place">',
            escape(environment.getattr(l_1_one, 'where')),
            '</span> <code>',
            escape(environment.getattr(l_1_one, 'title')),
            '</code></summary>\n',
        ))
        if environment.getattr(l_1_one, 'facts'):
            pass
            t_30.append(
                escape(context.call((undefined(name='facts') if l_0_facts is missing else l_0_facts), environment.getattr(l_1_one, 'facts'))),
            )
        for l_2_error in environment.getattr(l_1_one, 'exceptions'):
            _loop_vars = {}
            pass
            if environment.getattr(l_2_error, 'link'):
                pass
                t_30.extend((
                    '<h3><span class="place">',
                    escape(environment.getattr(l_2_error, 'link')),
                    '</span> <code>',
                    escape(environment.getattr(l_2_error, 'title')),
                    '</code></h3>',
                ))
            for l_3_frame in environment.getattr(l_2_error, 'frames'):
                _loop_vars = {}
                pass
                if environment.getattr(l_3_frame, 'locals'):
                    pass
                    t_30.extend((
                        '<details class="frame"',
                        escape((' open' if environment.getattr(l_3_frame, 'is_first') else cond_expr_undefined("the inline if-expression on line 188 in 'page.html' evaluated to false and no else section was defined."))),
                        '><summary><code>',
                        escape(environment.getattr(l_3_frame, 'function')),
                        '</code> <span class="place">',
                        escape(environment.getattr(l_3_frame, 'location')),
                        '</span></summary>',
                        escape(context.call((undefined(name='table') if l_0_table is missing else l_0_table), environment.getattr(l_3_frame, 'locals'), _loop_vars=_loop_vars)),
                        '</details>\n',
                    ))
                else:
                    pass
                    t_30.extend((
                        '<p class="frame"><code>',
                        escape(environment.getattr(l_3_frame, 'function')),
                        '</code> <span class="place">',
                        escape(environment.getattr(l_3_frame, 'location')),
                        '</span></p>\n',
                    ))
            l_3_frame = missing
        l_2_error = missing
        if environment.getattr(l_1_one, 'omitted'):
            pass
            t_30.extend((
                '<p class="note">',
                escape(environment.getattr(l_1_one, 'omitted')),
                ' more exceptions not shown.</p>',
            ))
        t_30.append(
            '</details>',
        )
        return concat(t_30)
    context.exported_vars.add('failure_view')
    context.vars['failure_view'] = l_0_failure_view = Macro(environment, macro, 'failure_view', ('one', 'open'), False, False, False, context.eval_ctx.autoescape)
    def macro(l_1_list):
        t_31 = []
        if l_1_list is missing:
            l_1_list = undefined("parameter 'list' was not provided", name='list')
        pass
        l_2_loop = missing
        for l_2_one, l_2_loop in LoopContext(l_1_list, undefined):
            _loop_vars = {}
            pass
            t_31.extend((
                '<details class="last-calls"',
                escape((' open' if (environment.getattr(l_2_one, 'is_culprit') and environment.getattr(l_2_loop, 'first')) else cond_expr_undefined("the inline if-expression on line 200 in 'page.html' evaluated to false and no else section was defined."))),
                '><summary>',
                escape(context.call((undefined(name='chip') if l_0_chip is missing else l_0_chip), environment.getattr(l_2_one, 'label'), environment.getattr(l_2_one, 'ranks'), environment.getattr(l_2_one, 'is_culprit'), _loop_vars=_loop_vars)),
                ' ',
                escape(environment.getattr(l_2_one, 'note')),
                ' <span class="count">',
                escape(environment.getattr(l_2_one, 'until')),
                '</span></summary>',
            ))
            if environment.getattr(l_2_one, 'lines'):
                pass
                t_31.extend((
                    '<pre class="lines">',
                    escape(t_3(context.eval_ctx, environment.getattr(l_2_one, 'lines'), '\n')),
                    '</pre>',
                ))
            t_31.append(
                '</details>\n',
            )
        l_2_loop = l_2_one = missing
        return concat(t_31)
    context.exported_vars.add('calls_view')
    context.vars['calls_view'] = l_0_calls_view = Macro(environment, macro, 'calls_view', ('list',), False, False, False, context.eval_ctx.autoescape)
    def macro(l_1_groups):
        t_32 = []
        l_1_odd = l_1_even = missing
        if l_1_groups is missing:
            l_1_groups = undefined("parameter 'groups' was not provided", name='groups')
        pass
        l_1_odd = t_5(context.eval_ctx, t_11(context, l_1_groups, 'is_odd'))
        for l_2_one in (undefined(name='odd') if l_1_odd is missing else l_1_odd)[:4]:
            _loop_vars = {}
            pass
            t_32.append(
                escape(context.call((undefined(name='table') if l_0_table is missing else l_0_table), environment.getattr(l_2_one, 'table'), _loop_vars=_loop_vars)),
            )
        l_2_one = missing
        if (undefined(name='odd') if l_1_odd is missing else l_1_odd)[4:]:
            pass
            t_32.extend((
                '<details><summary>',
                escape(t_4((undefined(name='odd') if l_1_odd is missing else l_1_odd)[4:])),
                ' more process group',
                escape(('s' if (t_4((undefined(name='odd') if l_1_odd is missing else l_1_odd)[4:]) > 1) else cond_expr_undefined("the inline if-expression on line 208 in 'page.html' evaluated to false and no else section was defined."))),
                ' whose ranks differ</summary>\n',
            ))
            for l_2_one in (undefined(name='odd') if l_1_odd is missing else l_1_odd)[4:]:
                _loop_vars = {}
                pass
                t_32.append(
                    escape(context.call((undefined(name='table') if l_0_table is missing else l_0_table), environment.getattr(l_2_one, 'table'), _loop_vars=_loop_vars)),
                )
            l_2_one = missing
            t_32.append(
                '</details>\n',
            )
        l_1_even = t_5(context.eval_ctx, t_7(context, l_1_groups, 'is_odd'))
        if (undefined(name='even') if l_1_even is missing else l_1_even):
            pass
            t_32.extend((
                '<details',
                escape((' open' if ((t_4((undefined(name='even') if l_1_even is missing else l_1_even)) == t_4(l_1_groups)) and (t_4((undefined(name='even') if l_1_even is missing else l_1_even)) < 4)) else cond_expr_undefined("the inline if-expression on line 214 in 'page.html' evaluated to false and no else section was defined."))),
                '><summary>',
                escape(t_4((undefined(name='even') if l_1_even is missing else l_1_even))),
                ' process group',
                escape(('s' if (t_4((undefined(name='even') if l_1_even is missing else l_1_even)) > 1) else cond_expr_undefined("the inline if-expression on line 214 in 'page.html' evaluated to false and no else section was defined."))),
                ' whose ranks are all at the same collective</summary>\n',
            ))
            for l_2_one in (undefined(name='even') if l_1_even is missing else l_1_even):
                _loop_vars = {}
                pass
                t_32.append(
                    escape(context.call((undefined(name='table') if l_0_table is missing else l_0_table), environment.getattr(l_2_one, 'table'), _loop_vars=_loop_vars)),
                )
            l_2_one = missing
            t_32.append(
                '</details>\n',
            )
        return concat(t_32)
    context.exported_vars.add('collectives_view')
    context.vars['collectives_view'] = l_0_collectives_view = Macro(environment, macro, 'collectives_view', ('groups',), False, False, False, context.eval_ctx.autoescape)
    l_0_main = environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'main')
    context.vars['main'] = l_0_main
    context.exported_vars.add('main')
    l_0_has_machine = ((undefined(name='main') if l_0_main is missing else l_0_main) and (((((environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'host_status') or environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'gpus')) or environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'kernel_log')) or environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'cores')) or environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'machine')) or environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'captures')))
    context.vars['has_machine'] = l_0_has_machine
    context.exported_vars.add('has_machine')
    l_0_start = (environment.getattr(environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'timeline'), 'start') if environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'timeline') else 0)
    context.vars['start'] = l_0_start
    context.exported_vars.add('start')
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; style-src \'unsafe-inline\'; script-src \'sha256-'
    yield escape((undefined(name='digest') if l_0_digest is missing else l_0_digest))
    yield '\'; base-uri \'none\'; form-action \'none\'">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n<meta name="generator" content="saferun '
    yield escape(environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'version'))
    yield '">\n<title>'
    yield escape(environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'title'))
    yield '</title>\n<link rel="icon" href="data:,">\n<style>\n'
    yield escape(t_9((undefined(name='style') if l_0_style is missing else l_0_style)))
    yield '\n</style>\n</head>\n<body>\n<a class="skip" href="#main">Skip to the report</a>\n<header class="verdict '
    yield escape(environment.getattr(environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'verdict'), 'tone'))
    yield '">\n<div class="inner">\n<p class="kind">'
    yield escape(environment.getattr(environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'verdict'), 'kind'))
    yield '</p>\n<h1>'
    yield escape(environment.getattr(environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'verdict'), 'headline'))
    yield '</h1>\n'
    yield escape(context.call((undefined(name='verdict_body') if l_0_verdict_body is missing else l_0_verdict_body), environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'verdict')))
    yield '\n'
    if environment.getattr(environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'verdict'), 'facts'):
        pass
        yield escape(context.call((undefined(name='facts') if l_0_facts is missing else l_0_facts), environment.getattr(environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'verdict'), 'facts')))
    yield '</div>\n</header>\n<div class="body">\n<nav aria-label="Contents">\n<form class="tools with-script" role="search" aria-label="Find a rank"><label for="rank">Find rank</label> <input id="rank" inputmode="numeric" autocomplete="off" size="6"><output id="rank-count" for="rank"></output></form>\n<ul>\n<li><a href="#run">Run</a></li>\n'
    if environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'timeline'):
        pass
        yield '<li><a href="#timeline">Timeline</a></li>'
    if ((undefined(name='main') if l_0_main is missing else l_0_main) and (environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'ends') or environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'tracebacks'))):
        pass
        yield '<li><a href="#ends">Failures</a></li>'
    if environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'failures'):
        pass
        yield '<li><a href="#records">Failure records</a></li>'
    if ((undefined(name='main') if l_0_main is missing else l_0_main) and (environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'graph') or environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'waits'))):
        pass
        yield '<li><a href="#waits">Who waits for whom</a></li>'
    if ((undefined(name='main') if l_0_main is missing else l_0_main) and environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'stacks')):
        pass
        yield '<li><a href="#stacks">Stacks</a></li>'
    if ((undefined(name='main') if l_0_main is missing else l_0_main) and environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'groups')):
        pass
        yield '<li><a href="#collectives">Collectives</a></li>'
    if ((undefined(name='main') if l_0_main is missing else l_0_main) and environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'calls')):
        pass
        yield '<li><a href="#calls">Last calls</a></li>'
    if ((undefined(name='main') if l_0_main is missing else l_0_main) and environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'steps')):
        pass
        yield '<li><a href="#steps">Last steps</a></li>'
    if environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'slow'):
        pass
        yield '<li><a href="#slow">Slow ranks</a></li>'
    if environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'outputs'):
        pass
        yield '<li><a href="#output">Output</a></li>'
    if (undefined(name='has_machine') if l_0_has_machine is missing else l_0_has_machine):
        pass
        yield '<li><a href="#machine">Machine</a></li>'
    if environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'story'):
        pass
        yield '<li><a href="#story">Decisions</a></li>'
    if environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'earlier'):
        pass
        yield '<li><a href="#earlier">Earlier incidents</a></li>'
    if ((environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'checks') or environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'checks_ok')) or environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'matrix')):
        pass
        yield '<li><a href="#checks">Preflight</a></li>'
    if (environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'versions') or environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'environment')):
        pass
        yield '<li><a href="#versions">Environment</a></li>'
    if (environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'settings') or environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'defaults')):
        pass
        yield '<li><a href="#settings">Settings</a></li>'
    yield '</ul>\n</nav>\n<main id="main" tabindex="-1">\n<section id="run" class="wide" aria-labelledby="h-run"><h2 id="h-run">Run</h2>\n'
    yield escape(context.call((undefined(name='facts') if l_0_facts is missing else l_0_facts), environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'run')))
    yield '\n'
    if environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'command'):
        pass
        yield '<pre class="command">'
        yield escape(environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'command'))
        yield '</pre>'
    for l_1_note in environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'notes'):
        _loop_vars = {}
        pass
        yield '<p class="note">'
        yield escape(l_1_note)
        yield '</p>'
    l_1_note = missing
    yield '</section>\n'
    if environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'timeline'):
        pass
        yield '<section id="timeline" class="wide" aria-labelledby="h-timeline"><h2 id="h-timeline">Timeline</h2>\n<ul class="legend" aria-hidden="true">'
        def t_33(fiter):
            for (l_1_kind, l_1_text) in fiter:
                if (l_1_kind in t_5(context.eval_ctx, t_6(context, t_13(environment, t_6(context, environment.getattr(environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'timeline'), 'rows'), attribute='segments'), start=()), attribute='kind'))):
                    yield (l_1_kind, l_1_text)
        for (l_1_kind, l_1_text) in t_33(context.call(environment.getattr((undefined(name='phases') if l_0_phases is missing else l_0_phases), 'items'))):
            _loop_vars = {}
            pass
            yield '<li><span class="phase '
            yield escape(l_1_kind)
            yield '"></span>'
            yield escape(l_1_text)
            yield '</li>'
        l_1_kind = l_1_text = missing
        if t_5(context.eval_ctx, t_10(context, t_6(context, environment.getattr(environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'timeline'), 'rows'), attribute='steps'))):
            pass
            yield '<li><span class="mark step"></span>a reported step</li>'
        yield '<li><span class="mark exit-bad"></span>failed</li><li><span class="mark exit-stopped"></span>stopped</li><li><span class="mark exit-ok"></span>exit code 0</li></ul>\n'
        if environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'closing'):
            pass
            yield '<h3>The end</h3>\n'
            yield escape(context.call((undefined(name='timeline_view') if l_0_timeline_view is missing else l_0_timeline_view), environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'closing'), (undefined(name='start') if l_0_start is missing else l_0_start), 'Timeline of the end'))
            yield '\n<h3>The whole run</h3>\n'
        yield escape(context.call((undefined(name='timeline_view') if l_0_timeline_view is missing else l_0_timeline_view), environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'timeline'), (undefined(name='start') if l_0_start is missing else l_0_start), 'Timeline of the whole run'))
        yield '\n</section>\n'
    if ((undefined(name='main') if l_0_main is missing else l_0_main) and (environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'ends') or environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'tracebacks'))):
        pass
        yield '<section id="ends" aria-labelledby="h-ends"><h2 id="h-ends">Failures</h2>\n'
        yield escape(context.call((undefined(name='pieces') if l_0_pieces is missing else l_0_pieces), environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'tracebacks'), 'first'))
        yield '\n'
        if environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'ends'):
            pass
            yield escape(context.call((undefined(name='table') if l_0_table is missing else l_0_table), environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'ends')))
        yield '</section>\n'
    if environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'failures'):
        pass
        yield '<section id="records" aria-labelledby="h-records"><h2 id="h-records">Failure records</h2>\n<p class="note">What the locals were at the exceptions that ended ranks; strings are left out.'
        if ((undefined(name='main') if l_0_main is missing else l_0_main) and environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'gpus')):
            pass
            yield ' The state of the GPUs when ranks were captured: <a href="#machine">Machine</a>.'
        yield '</p>\n'
        l_1_loop = missing
        for l_1_one, l_1_loop in LoopContext(environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'failures'), undefined):
            _loop_vars = {}
            pass
            yield escape(context.call((undefined(name='failure_view') if l_0_failure_view is missing else l_0_failure_view), l_1_one, environment.getattr(l_1_loop, 'first'), _loop_vars=_loop_vars))
        l_1_loop = l_1_one = missing
        yield '</section>\n'
    if ((undefined(name='main') if l_0_main is missing else l_0_main) and (environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'graph') or environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'waits'))):
        pass
        yield '<section id="waits" aria-labelledby="h-waits"><h2 id="h-waits">Who waits for whom</h2>\n'
        if environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'graph'):
            pass
            yield escape(context.call((undefined(name='graph_view') if l_0_graph_view is missing else l_0_graph_view), environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'graph'), 0))
            if ('collectives' in environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'truncated')):
                pass
                yield '<p class="note">Only ranks whose collectives fitted into report.json.</p>'
        if environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'waits'):
            pass
            yield escape(context.call((undefined(name='table') if l_0_table is missing else l_0_table), environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'waits')))
        yield '</section>\n'
    if ((undefined(name='main') if l_0_main is missing else l_0_main) and environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'groups')):
        pass
        yield '<section id="collectives" aria-labelledby="h-collectives"><h2 id="h-collectives">Collectives</h2>\n<p class="note">From the Flight Recorder, by process group. Highlighted: ranks that are not where most are.'
        if ('collectives' in environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'truncated')):
            pass
            yield ' report.json had no room for all ranks.'
        yield '</p>\n'
        yield escape(context.call((undefined(name='collectives_view') if l_0_collectives_view is missing else l_0_collectives_view), environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'groups')))
        yield '\n</section>\n'
    if ((undefined(name='main') if l_0_main is missing else l_0_main) and environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'stacks')):
        pass
        yield '<section id="stacks" class="wide" aria-labelledby="h-stacks"><h2 id="h-stacks">Stacks</h2>\n'
        yield escape(context.call((undefined(name='stack_views') if l_0_stack_views is missing else l_0_stack_views), environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'stacks'), 'main'))
        yield '\n</section>\n'
    if ((undefined(name='main') if l_0_main is missing else l_0_main) and environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'calls')):
        pass
        yield '<section id="calls" aria-labelledby="h-calls"><h2 id="h-calls">Last calls</h2>\n<p class="note">Recorded by --trace-calls, the newest last.</p>\n'
        yield escape(context.call((undefined(name='calls_view') if l_0_calls_view is missing else l_0_calls_view), environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'calls')))
        yield '\n</section>\n'
    if ((undefined(name='main') if l_0_main is missing else l_0_main) and environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'steps')):
        pass
        yield '<section id="steps" aria-labelledby="h-steps"><h2 id="h-steps">Last steps</h2>\n'
        yield escape(context.call((undefined(name='table') if l_0_table is missing else l_0_table), environment.getattr((undefined(name='main') if l_0_main is missing else l_0_main), 'steps')))
        yield '\n</section>\n'
    if environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'slow'):
        pass
        yield '<section id="slow" aria-labelledby="h-slow"><h2 id="h-slow">Slow ranks</h2>\n'
        for l_1_lines in environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'slow'):
            _loop_vars = {}
            pass
            yield '<pre class="lines">'
            yield escape(t_3(context.eval_ctx, l_1_lines, '\n'))
            yield '</pre>'
        l_1_lines = missing
        yield '</section>\n'
    if environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'outputs'):
        pass
        yield '<section id="output" aria-labelledby="h-output"><h2 id="h-output">Last output of the ranks</h2>\n<form class="tools with-script" role="search" aria-label="Search the output"><label for="search">Search</label> <input id="search" type="search" autocomplete="off"><output id="search-count" for="search"></output></form>\n<div class="outputs">\n'
        for l_1_block in environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'outputs')[:24]:
            _loop_vars = {}
            pass
            yield escape(context.call((undefined(name='output_block') if l_0_output_block is missing else l_0_output_block), l_1_block, (t_4(environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'outputs')) < 4), _loop_vars=_loop_vars))
            yield '\n'
        l_1_block = missing
        if environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'outputs')[24:]:
            pass
            yield '<details class="more"><summary>'
            yield escape(t_4(environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'outputs')[24:]))
            yield ' more</summary>\n'
            for l_1_block in environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'outputs')[24:]:
                _loop_vars = {}
                pass
                yield escape(context.call((undefined(name='output_block') if l_0_output_block is missing else l_0_output_block), l_1_block, False, _loop_vars=_loop_vars))
                yield '\n'
            l_1_block = missing
            yield '</details>\n'
        yield '</div>\n'
        if environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'outputs_omitted'):
            pass
            yield '<p class="note">'
            yield escape(environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'outputs_omitted'))
            yield '</p>'
        yield '</section>\n'
    if (undefined(name='has_machine') if l_0_has_machine is missing else l_0_has_machine):
        pass
        yield '<section id="machine" aria-labelledby="h-machine"><h2 id="h-machine">Machine</h2>\n'
        yield escape(context.call((undefined(name='machine_view') if l_0_machine_view is missing else l_0_machine_view), (undefined(name='main') if l_0_main is missing else l_0_main)))
        yield '\n</section>\n'
    if environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'story'):
        pass
        yield '<section id="story" aria-labelledby="h-story"><h2 id="h-story">Decisions</h2>\n'
        yield escape(context.call((undefined(name='table') if l_0_table is missing else l_0_table), environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'story')))
        yield '\n</section>\n'
    if environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'earlier'):
        pass
        yield '<section id="earlier" class="wide" aria-labelledby="h-earlier"><h2 id="h-earlier">Earlier incidents</h2>\n'
        l_1_loop = missing
        for l_1_one, l_1_loop in LoopContext(environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'earlier'), undefined):
            _loop_vars = {}
            pass
            yield '<details class="incident"><summary><span class="badge '
            yield escape(environment.getattr(environment.getattr(l_1_one, 'verdict'), 'tone'))
            yield '">'
            yield escape(environment.getattr(environment.getattr(l_1_one, 'verdict'), 'kind'))
            yield '</span> attempt '
            yield escape(environment.getattr(l_1_one, 'attempt'))
            yield ', '
            yield escape(environment.getattr(l_1_one, 'clock'))
            yield ': '
            yield escape(environment.getattr(environment.getattr(l_1_one, 'verdict'), 'headline'))
            yield '</summary>\n'
            yield escape(context.call((undefined(name='verdict_body') if l_0_verdict_body is missing else l_0_verdict_body), environment.getattr(l_1_one, 'verdict'), _loop_vars=_loop_vars))
            yield '\n'
            yield escape(context.call((undefined(name='facts') if l_0_facts is missing else l_0_facts), environment.getattr(environment.getattr(l_1_one, 'verdict'), 'facts'), _loop_vars=_loop_vars))
            yield '\n'
            if environment.getattr(l_1_one, 'graph'):
                pass
                yield escape(context.call((undefined(name='graph_view') if l_0_graph_view is missing else l_0_graph_view), environment.getattr(l_1_one, 'graph'), environment.getattr(l_1_loop, 'index'), _loop_vars=_loop_vars))
            if environment.getattr(l_1_one, 'waits'):
                pass
                yield escape(context.call((undefined(name='table') if l_0_table is missing else l_0_table), environment.getattr(l_1_one, 'waits'), _loop_vars=_loop_vars))
            if environment.getattr(l_1_one, 'stacks'):
                pass
                yield escape(context.call((undefined(name='stack_views') if l_0_stack_views is missing else l_0_stack_views), environment.getattr(l_1_one, 'stacks'), t_12(environment.getattr(l_1_loop, 'index')), _loop_vars=_loop_vars))
            yield escape(context.call((undefined(name='pieces') if l_0_pieces is missing else l_0_pieces), environment.getattr(l_1_one, 'tracebacks'), _loop_vars=_loop_vars))
            yield '\n'
            if environment.getattr(l_1_one, 'calls'):
                pass
                yield escape(context.call((undefined(name='calls_view') if l_0_calls_view is missing else l_0_calls_view), environment.getattr(l_1_one, 'calls'), _loop_vars=_loop_vars))
            if environment.getattr(l_1_one, 'steps'):
                pass
                yield escape(context.call((undefined(name='table') if l_0_table is missing else l_0_table), environment.getattr(l_1_one, 'steps'), _loop_vars=_loop_vars))
            if environment.getattr(l_1_one, 'ends'):
                pass
                yield escape(context.call((undefined(name='table') if l_0_table is missing else l_0_table), environment.getattr(l_1_one, 'ends'), _loop_vars=_loop_vars))
            yield escape(context.call((undefined(name='machine_view') if l_0_machine_view is missing else l_0_machine_view), l_1_one, _loop_vars=_loop_vars))
            yield '\n</details>\n'
        l_1_loop = l_1_one = missing
        yield '</section>\n'
    if ((environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'checks') or environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'checks_ok')) or environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'matrix')):
        pass
        yield '<section id="checks" aria-labelledby="h-checks"><h2 id="h-checks">Preflight</h2>\n'
        if environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'checks'):
            pass
            yield escape(context.call((undefined(name='table') if l_0_table is missing else l_0_table), environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'checks')))
        if environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'matrix'):
            pass
            yield '<div class="scroll" role="region" tabindex="0" aria-label="Hosts by interfaces">\n<table class="matrix"><caption>Interfaces, as the other hosts reach them</caption>\n<thead><tr><th scope="col">Host</th>'
            for l_1_nic in environment.getattr(environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'matrix'), 'nics'):
                _loop_vars = {}
                pass
                yield '<th scope="col">'
                yield escape(l_1_nic)
                yield '</th>'
            l_1_nic = missing
            yield '</tr></thead>\n<tbody>'
            for (l_1_host, l_1_cells) in environment.getattr(environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'matrix'), 'rows'):
                _loop_vars = {}
                pass
                yield '<tr><th scope="row">'
                yield escape(l_1_host)
                yield '</th>'
                for l_2_cell in l_1_cells:
                    _loop_vars = {}
                    pass
                    yield '<td class="cell '
                    yield escape(environment.getattr(l_2_cell, 'tone'))
                    yield '" title="'
                    yield escape(environment.getattr(l_2_cell, 'title'))
                    yield '">'
                    yield escape(environment.getattr(l_2_cell, 'text'))
                    yield '</td>'
                l_2_cell = missing
                yield '</tr>\n'
            l_1_host = l_1_cells = missing
            yield '</tbody></table></div>\n'
            if environment.getattr(environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'matrix'), 'folded'):
                pass
                yield '<p class="note">'
                yield escape(environment.getattr(environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'matrix'), 'folded'))
                yield '</p>'
        if environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'checks_ok'):
            pass
            yield '<details><summary>'
            yield escape(environment.getattr(environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'checks_ok'), 'caption'))
            yield '</summary>'
            yield escape(context.call((undefined(name='table') if l_0_table is missing else l_0_table), environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'checks_ok')))
            yield '</details>'
        yield '</section>\n'
    if (environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'versions') or environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'environment')):
        pass
        yield '<section id="versions" aria-labelledby="h-versions"><h2 id="h-versions">Environment</h2>\n'
        if environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'versions'):
            pass
            yield escape(context.call((undefined(name='table') if l_0_table is missing else l_0_table), environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'versions')))
        if environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'environment'):
            pass
            yield escape(context.call((undefined(name='table') if l_0_table is missing else l_0_table), environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'environment')))
        yield '</section>\n'
    if (environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'settings') or environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'defaults')):
        pass
        yield '<section id="settings" aria-labelledby="h-settings"><h2 id="h-settings">Settings</h2>\n'
        if environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'settings'):
            pass
            yield escape(context.call((undefined(name='table') if l_0_table is missing else l_0_table), environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'settings')))
        if environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'defaults'):
            pass
            yield '<details><summary>'
            yield escape(t_4(environment.getattr(environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'defaults'), 'rows')))
            yield ' setting'
            yield escape(('s have their defaults' if (t_4(environment.getattr(environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'defaults'), 'rows')) > 1) else ' has its default'))
            yield '</summary>'
            yield escape(context.call((undefined(name='table') if l_0_table is missing else l_0_table), environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'defaults')))
            yield '</details>'
        yield '</section>\n'
    yield '</main>\n</div>\n<footer><p>Made by saferun '
    yield escape(environment.getattr((undefined(name='page') if l_0_page is missing else l_0_page), 'version'))
    yield ' at '
    yield escape((undefined(name='now') if l_0_now is missing else l_0_now))
    yield '. The values of secrets were redacted. <code>report.json</code> in the run directory has all of it for programs.</p></footer>\n<script type="application/json" id="data">'
    yield escape(t_9((undefined(name='data') if l_0_data is missing else l_0_data)))
    yield '</script>\n<script>\n'
    yield escape(t_9((undefined(name='script') if l_0_script is missing else l_0_script)))
    yield '\n</script>\n</body>\n</html>'

blocks = {}
debug_info = '1=103&2=115&5=125&6=136&7=138&8=150&9=153&11=166&12=172&17=221&20=231&22=239&23=244&28=261&29=269&30=270&32=273&33=277&34=304&35=311&36=316&38=321&39=325&47=338&53=348&54=352&57=359&59=369&63=373&64=376&65=382&73=405&74=413&75=416&76=420&78=431&83=438&86=447&87=457&88=459&89=462&90=467&92=473&93=482&95=490&96=495&97=497&98=505&99=512&100=518&107=529&108=534&111=541&116=554&117=565&118=567&120=582&121=598&122=619&124=639&128=669&129=681&130=684&131=699&132=702&134=712&135=716&139=724&141=729&142=735&146=746&150=759&151=768&152=770&153=781&157=787&158=792&159=799&160=816&163=836&164=844&167=861&168=866&169=873&170=878&171=885&172=891&173=896&176=911&177=918&180=938&181=947&182=949&183=956&184=961&185=964&186=973&187=976&188=980&190=993&194=1000&198=1013&199=1019&200=1024&204=1047&205=1053&206=1054&207=1061&208=1065&209=1070&212=1080&213=1081&214=1085&215=1092&220=1105&221=1108&222=1111&227=1115&231=1117&232=1119&235=1121&240=1123&242=1125&243=1127&244=1129&245=1131&253=1135&254=1138&255=1141&256=1144&257=1147&258=1150&259=1153&260=1156&261=1159&262=1162&263=1165&264=1168&265=1171&266=1174&267=1177&268=1180&273=1184&274=1186&275=1191&277=1199&279=1202&280=1219&282=1222&285=1224&288=1226&290=1229&291=1231&294=1235&296=1238&297=1243&300=1249&302=1252&303=1258&306=1262&308=1265&309=1269&312=1271&314=1274&317=1276&320=1279&323=1281&325=1284&328=1286&330=1289&333=1297&337=1300&338=1303&340=1306&341=1309&342=1311&343=1314&348=1319&351=1325&353=1328&356=1330&358=1333&361=1335&363=1339&364=1343&365=1353&366=1355&367=1357&368=1360&369=1363&370=1366&371=1368&372=1371&373=1374&374=1377&379=1381&381=1384&382=1387&385=1390&386=1398&388=1418&390=1423&393=1431&395=1434&396=1437&399=1441&401=1444&402=1447&407=1458&408=1462&410=1464'

DIGEST = "dda590c004a816cbb95359386245f857ee414138628e6daa4187587da5a9c3dc"
BYTECODE_VERSION = 5
